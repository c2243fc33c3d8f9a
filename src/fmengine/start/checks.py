"""What a training run cannot do without, looked at before anything is loaded; a line each."""

import re
from collections.abc import Mapping, Sequence

from fmengine.start.machine import Machine
from fmengine.start.variants import VARIANTS, variant_for

SHARED_MEMORY = 1 << 30
"""Bytes of /dev/shm that several ranks need: NCCL and gloo move tensors through it; docker's default is 64 MB."""

NO_GPU = ("", "-1", "NoDevFiles")
"""Values of CUDA_VISIBLE_DEVICES that ask for the CPU."""


def problems(variant: str, environ: Mapping[str, str], arguments: Sequence[str], machine: Machine) -> list[str]:
    """All that keeps this machine from training with this image.

    Args:
        variant: the image's; one that we do not know is asked for nothing.
        environ: for the ranks of this node, CUDA_VISIBLE_DEVICES and the container's runtime.
        arguments: for --workers.
        machine: what there is.
    """
    found = [] if wants_cpu(environ) else gpu_problems(variant, environ, machine)
    return found + glibc_problems(machine) + memory_problems(environ, arguments, machine)


def wants_cpu(environ: Mapping[str, str]) -> bool:
    """Whether the user asks for the CPU."""
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    return visible is not None and visible.strip() in NO_GPU


def is_apptainer(environ: Mapping[str, str]) -> bool:
    """Whether Apptainer or Singularity runs this container."""
    return "APPTAINER_CONTAINER" in environ or "SINGULARITY_CONTAINER" in environ


def gpu_problems(variant: str, environ: Mapping[str, str], machine: Machine) -> list[str]:
    """No GPU in a CUDA image, or a driver that is too old for it."""
    known = VARIANTS.get(variant)
    if known is None or not known.cuda:
        return []
    if machine.gpu_devices and machine.has_libcuda:
        return _driver_problems(variant, machine)
    option = "--nv" if is_apptainer(environ) else "--gpus all"
    if machine.gpu_devices or machine.driver:
        what = f"the machine has an NVIDIA GPU, but this container does not see it; start it with {option}"
    else:
        what = f"no NVIDIA GPU is visible; start it with {option}, on a machine or in a job that has one"
    return [f"image {variant}: {what}, or set CUDA_VISIBLE_DEVICES= to train on the CPU"]


def _driver_problems(variant: str, machine: Machine) -> list[str]:
    needed = VARIANTS[variant].driver
    if machine.driver is None or int(machine.driver.split(".")[0]) >= needed:
        return []
    other = variant_for(int(machine.driver.split(".")[0]), machine.architecture)
    advice = f"use the image {other}" if other else "no image runs on it; ask for a newer driver"
    return [f"image {variant}: NVIDIA's driver here is {machine.driver}, and it needs {needed} or newer; {advice}"]


def glibc_problems(machine: Machine) -> list[str]:
    """Libraries of the host that the image's C library is too old for; the most demanding one is named."""
    unfit = {library: needed for library, needed in machine.host_libraries.items() if needed > machine.glibc}
    if not unfit:
        return []
    library, needed = max(unfit.items(), key=lambda item: item[1])
    return [
        f"{library}: this library of the host needs glibc {_dotted(needed)}, and the image has "
        f"{_dotted(machine.glibc)}; use an image with a newer base, or ask the site for libraries for an older one"
    ]


def memory_problems(environ: Mapping[str, str], arguments: Sequence[str], machine: Machine) -> list[str]:
    """A /dev/shm that several ranks on this node do not fit into."""
    ranks = local_ranks(environ, arguments, machine)
    size = machine.shared_memory or 0
    if ranks < 2 or size >= SHARED_MEMORY:
        return []
    if is_apptainer(environ):
        advice = "bind the host's (--bind /dev/shm)"
    else:
        advice = "start the container with --ipc=host or --shm-size=8g"
    return [f"/dev/shm has {size >> 20} MB, too little for {ranks} processes (1 GiB at least); {advice}"]


def local_ranks(environ: Mapping[str, str], arguments: Sequence[str], machine: Machine) -> int:
    """Processes of the run on this node: as the launcher says, as --workers says, or one a GPU."""
    if environ.get("LOCAL_WORLD_SIZE", "").isdecimal():
        return int(environ["LOCAL_WORLD_SIZE"])
    if "SLURM_PROCID" in environ and "SLURM_STEP_TASKS_PER_NODE" in environ:  # such as 4(x2),3
        counts = re.findall(r"(?:^|,)(\d+)", environ["SLURM_STEP_TASKS_PER_NODE"])
        return max(map(int, counts), default=1)
    words = " ".join(arguments)
    workers = re.search(r"(?:^|\s)--workers[= ](\d+)", words)
    if workers:
        return int(workers[1])
    return 1 if wants_cpu(environ) else max(1, machine.gpu_devices)


def _dotted(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))
