"""torch.distributed and DeepSpeed's view of it, started once from explicit ranks."""

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

TIMEOUT = timedelta(minutes=30)
"""How long a collective may wait before torch gives up; loading a large model is the longest wait."""


def start(*, rank: int, world_size: int, device: torch.device, init_method: str) -> None:
    """Join the process group (NCCL on GPUs with gloo for objects, gloo on CPUs) and tell DeepSpeed.

    Args:
        rank: this process.
        world_size: all processes; 1 makes a group of one.
        device: this rank's device; a GPU becomes the current one.
        init_method: torch's rendezvous address, such as tcp://HOST:PORT.
    """
    import deepspeed

    if device.type == "cuda":
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, init_method=init_method, rank=rank, world_size=world_size, timeout=TIMEOUT)
    deepspeed.init_distributed("nccl" if device.type == "cuda" else "gloo", auto_mpi_discovery=False, verbose=False)


def stop() -> None:
    """Leave the process group, where there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()


def sequence_parallel_mpu(sequence_parallel_size: int) -> Any:
    """DeepSpeed's `parallel_state_sp` with its groups made: the mpu that ZeRO needs under sequence parallelism.

    DeepSpeed's own `sequence_parallel_size` mesh leaves these ranks out of ZeRO's reduction (pinned in
    tests/contract). None where the size is 1.
    """
    if sequence_parallel_size == 1:
        return None
    from deepspeed.runtime.sequence_parallel import parallel_state_sp as mpu

    if mpu._SEQUENCE_PARALLEL_GROUP is None:
        mpu.initialize_sequence_parallel(sequence_parallel_size)
    return mpu
