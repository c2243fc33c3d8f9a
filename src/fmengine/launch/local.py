"""One machine and no launcher: this process as the only rank, or as the parent of local workers."""

import os
import random
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from fmengine.errors import UserError
from fmengine.launch.children import run_children
from fmengine.launch.ranks import Ranks

ADDRESS = "127.0.0.1"

EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
"""Ports that the kernel gives to outgoing connections, which could take one between choosing and listening."""


def detect_local(*, gpus: int) -> Ranks:
    """What this machine can run: a worker a GPU, or one on the CPU. This process is none of them."""
    workers = max(gpus, 1)
    seen = "no GPU is" if gpus == 0 else "1 GPU is" if gpus == 1 else f"{gpus} GPUs are"
    return Ranks(
        rank=None,
        local_rank=None,
        world_size=workers,
        local_world_size=workers,
        node_rank=0,
        num_nodes=1,
        device="cuda:0" if gpus else "cpu",
        master_addr=ADDRESS,
        master_port=None,
        source="local",
        reason=f"no launcher's variables are set and {seen} visible: `train` would start {workers} here",
    )


def alone(*, gpus: int) -> Ranks:
    """The process itself as the only rank of a run."""
    return replace(
        detect_local(gpus=min(gpus, 1)),
        rank=0,
        local_rank=0,
        master_port=free_port(),
        reason="no launcher's variables are set: the only process of its run",
    )


def run_workers(arguments: Sequence[str], workers: int, environ: Mapping[str, str], *, gpus: int) -> int:
    """Run this same command in `workers` local processes, rank 0 on this terminal; returns their exit code.

    Args:
        arguments: the command line, without the program's name.
        workers: how many ranks.
        environ: what the workers inherit; torchrun's variables are added.
        gpus: GPUs that the workers will see; 0 for the CPU.

    Raises:
        UserError: more workers than GPUs.
    """
    if 0 < gpus < workers:
        raise UserError(
            f"--workers {workers}: more than the {gpus} visible GPUs; give {gpus} at most, or set "
            "CUDA_VISIBLE_DEVICES= to train on the CPU"
        )
    # -P: as in the parent, a file that lies in the current directory is no module
    command = [sys.executable, "-P", "-m", "fmengine", *arguments]
    port = free_port()
    return run_children(command, [worker_environ(environ, rank, workers, port) for rank in range(workers)])


def worker_environ(environ: Mapping[str, str], rank: int, workers: int, port: int) -> dict[str, str]:
    """The environment of one local worker: torchrun's variables over what is there."""
    threads = max(1, len(os.sched_getaffinity(0)) // workers)
    return {
        "OMP_NUM_THREADS": str(threads),  # the cores are shared; a user's own setting stays
        **environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(workers),
        "LOCAL_WORLD_SIZE": str(workers),
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "MASTER_ADDR": ADDRESS,
        "MASTER_PORT": str(port),
    }


def free_port(ephemeral: tuple[int, int] | None = None) -> int:
    """A TCP port of this machine that nothing listens on, outside the ephemeral range, chosen at random.

    Random, so that two runs that start together on one machine do not meet.

    Args:
        ephemeral: first and last port of that range; the kernel's own by default.
    """
    first, last = ephemeral or _ephemeral()
    ports = [port for port in range(10000, 1 << 16) if not first <= port <= last]
    random.Random().shuffle(ports)
    for port in ports:
        with socket.socket() as probe:
            try:
                probe.bind((ADDRESS, port))
            except OSError:
                continue
            return port
    raise UserError(f"no free TCP port on {ADDRESS} outside {first}-{last}; end other programs that listen here")


def _ephemeral() -> tuple[int, int]:
    try:
        first, last = EPHEMERAL.read_text().split()
    except OSError:
        return 32768, 60999  # Linux's default
    return int(first), int(last)
