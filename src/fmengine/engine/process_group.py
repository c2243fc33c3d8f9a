"""torch.distributed and DeepSpeed's view of it, started once from explicit ranks."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

from fmengine.errors import PeerLostError
from fmengine.parallel import Topology

TIMEOUT = timedelta(minutes=30)
"""How long a collective may wait before torch gives up; loading a large model is the longest wait."""

PREPARED, PREPARATION = "fmengine/prepared", timedelta(days=1)
"""Key that rank 0 sets when the run is prepared, and how long the others wait for it."""

LOST_PEER = ("closed by peer", "reset by peer", "remote process exited")
"""In the messages of gloo (the first two) and NCCL."""


def open_store(*, rank: int, world_size: int, host: str, port: int) -> TCPStore:
    """The key-value store that ranks meet in; rank 0 serves it, the others wait until it does.

    Raises:
        RuntimeError: rank 0 is not there in time, or its port is taken.
    """
    return TCPStore(host, port, world_size, is_master=rank == 0, wait_for_workers=False, timeout=TIMEOUT)


@contextmanager
def after_rank_0(store: Store, rank: int) -> Iterator[None]:
    """A block that rank 0 alone has work in; the others go on when it is done, and end when it failed or is gone.

    No collective is waiting meanwhile, so the work may take hours (a checkpoint of terabytes to convert).

    Raises:
        PeerLostError: on the others, where rank 0's block raised or its process died.
    """
    if rank == 0:
        try:
            yield
        except BaseException:
            store.set(PREPARED, "failed")
            raise
        store.set(PREPARED, "done")
        return
    yield
    try:
        store.wait([PREPARED], PREPARATION)
        failed = store.get(PREPARED) != b"done"
    except (RuntimeError, dist.DistNetworkError) as error:
        raise PeerLostError(f"rank {rank} ends: rank 0 is gone; its line or log says why") from error
    if failed:
        raise PeerLostError(f"rank {rank} ends: rank 0 could not prepare the run; its line or log says why")


def start(*, rank: int, world_size: int, device: torch.device, store: Store) -> None:
    """Join the process group (NCCL on GPUs with gloo for objects, gloo on CPUs) and tell DeepSpeed.

    Args:
        rank: this process.
        world_size: all processes; 1 makes a group of one.
        device: this rank's device; a GPU becomes the current one.
        store: what `open_store` gave.
    """
    import deepspeed

    leave_shared_memory_out()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=TIMEOUT)
    deepspeed.init_distributed("nccl" if device.type == "cuda" else "gloo", auto_mpi_discovery=False, verbose=False)


def leave_shared_memory_out() -> None:
    """Keep DeepSpeed from building its all-reduce through shared memory, which must stay off (tests/contract) anyway.

    It is built, or looked up, at every start on a CPU under a lock file; a process that is killed meanwhile leaves
    that behind, and every later start on this machine would wait for it for ever.
    """
    from deepspeed import ops

    ops.__compatible_ops__["deepspeed_shm_comm"] = False


def stop() -> None:
    """Leave the process group, where there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()


def is_lost_peer(error: BaseException) -> bool:
    """Whether a collective failed because another rank's process is gone; gloo and NCCL say so in words alone."""
    return any(words in str(error) for words in LOST_PEER)


def model_parallel_unit(topology: Topology) -> Any:
    """DeepSpeed's "mpu" with its groups made, or None where a replica is one rank. Process-wide: one layout a process.

    Sequence parallelism: `parallel_state_sp`, since DeepSpeed's own `sequence_parallel_size` mesh leaves the sequence
    ranks out of ZeRO's reduction. Tensor parallelism: DeepSpeed's `groups`. Both pinned in tests/contract.
    """
    if topology.sequence_parallel_size > 1:
        return _sequence_unit(topology)
    if topology.tensor_parallel_size > 1 and topology.pipeline_parallel_size == 1:
        from deepspeed.utils import groups

        groups._init_tp_mesh_device(tensor_model_parallel_size=topology.tensor_parallel_size)
        return groups
    return None


def _sequence_unit(topology: Topology) -> Any:
    """`parallel_state_sp` without its alias of model-parallel to the sequence group.

    With the alias DeepSpeed's bf16 optimizer takes the sequence ranks for copies of one another, and finds no gradient
    to clip on the second.
    """
    from deepspeed.runtime.sequence_parallel import parallel_state_sp as state

    if state._SEQUENCE_PARALLEL_GROUP is None:
        state.initialize_sequence_parallel(topology.sequence_parallel_size)
    alone = dist.new_group([topology.rank], use_local_synchronization=True)  # no other rank takes part in it
    sequence = {name: value for name, value in vars(state).items() if name.startswith("get_sequence")}
    return SimpleNamespace(
        **sequence,
        initialize_sequence_parallel=state.initialize_sequence_parallel,  # by this name DeepSpeed knows a sequence mpu
        get_model_parallel_rank=lambda: 0,
        get_model_parallel_world_size=lambda: 1,
        get_model_parallel_group=lambda: alone,
    )
