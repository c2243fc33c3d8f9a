"""GPUs that this process sees, and the one that a local rank computes on; without importing torch."""

import contextlib
import shutil
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path

from fmengine.errors import UserError

DRIVER = Path("/proc/driver/nvidia/gpus")
"""One folder a GPU, written by NVIDIA's kernel driver."""

SECONDS = 60
"""Longest wait for nvidia-smi; a sick driver can hang it."""

NONE_FOUND = 6
"""nvidia-smi's exit code where it finds no device that it may see (its manual page, RETURN VALUE)."""


def count_gpus(environ: Mapping[str, str], installed: Callable[[], int] | None = None) -> int:
    """GPUs that CUDA would show this process.

    Args:
        environ: for CUDA_VISIBLE_DEVICES. As CUDA reads it, a list ends at its first invalid entry.
        installed: counts the GPUs that there are; `installed_gpus` by default.
    """
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and visible.strip() in ("", "-1", "NoDevFiles"):
        return 0
    there = (installed or installed_gpus)()
    if visible is None or not there:
        return there
    entries = [entry.strip() for entry in visible.split(",")]
    count = 0
    for entry in entries:
        if not entry.startswith(("GPU-", "MIG-")) and not (entry.isdecimal() and int(entry) < there):
            break
        count += 1
    return count


def installed_gpus() -> int:
    """GPUs that this process may use, whatever CUDA_VISIBLE_DEVICES says.

    nvidia-smi knows the devices that a batch system's cgroup allows; the driver's own list, which
    stands in where there is no nvidia-smi or it fails, has all of the node. A GPU that is sick is
    counted, so that the run ends with its error and does not go on in silence on the CPU.
    """
    program = shutil.which("nvidia-smi")
    if program is not None:
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            listed = subprocess.run([program, "-L"], capture_output=True, text=True, timeout=SECONDS, check=False)
            if listed.returncode in (0, NONE_FOUND):
                return sum(line.startswith("GPU ") for line in listed.stdout.splitlines())
    return len([*DRIVER.iterdir()]) if DRIVER.is_dir() else 0


def device_of(local_rank: int, local_world_size: int, gpus: int) -> str:
    """The device of a local rank: its own GPU, or the only one that it sees, or the CPU.

    Raises:
        UserError: several GPUs, but fewer than local ranks.
    """
    if gpus == 0:
        return "cpu"
    if gpus == 1:  # the batch system gave each rank its own; CUDA counts from 0 in each
        return "cuda:0"
    if local_world_size > gpus:
        raise UserError(
            f"LOCAL_WORLD_SIZE={local_world_size}: more processes on this node than GPUs ({gpus}); start {gpus} a "
            "node, or set CUDA_VISIBLE_DEVICES= to train on the CPU"
        )
    return f"cuda:{local_rank}"
