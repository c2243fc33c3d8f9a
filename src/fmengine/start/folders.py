"""Places to write: on the node, one folder a job and rank."""

import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from fmengine.start.machine import CACHES, Machine, exists

ROOM = 64 << 20
"""Bytes that a folder must have free; a first compilation writes some tens of MB."""

VARIABLES = {
    "TRITON_CACHE_DIR": "triton",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TORCH_EXTENSIONS_DIR": "torch_extensions",
    "TORCH_HOME": "torch",
    "HF_HOME": "huggingface",
    "MPLCONFIGDIR": "matplotlib",
    "WANDB_DIR": "wandb",
    "WANDB_CACHE_DIR": "wandb-cache",
    "WANDB_CONFIG_DIR": "wandb-config",
    "WANDB_DATA_DIR": "wandb-data",
    "XDG_CACHE_HOME": "cache",
    "CUDA_CACHE_PATH": "cuda",
    "NUMBA_CACHE_DIR": "numba",
}
"""Variable to its folder in a rank's."""

BAKED = "TORCH_EXTENSIONS_DIR"
"""What the image may have compiled already, in a folder of its Python environment."""


@dataclass
class Folders:
    """Where to write.

    Attributes:
        changes: variable to its value.
        lines: what was not as the user wanted it.
        problems: why there is no place at all.
        temporary: folder that ends with this process; None where a job or a parent owns it.
    """

    changes: dict[str, str | None] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    temporary: Path | None = None


def choose(environ: Mapping[str, str], machine: Machine) -> Folders:
    """Choose and make the folder of this job and rank, and point every cache, HOME and TMPDIR there where needed."""
    result = Folders()
    base = _base(environ, machine, result)
    if base is None:
        return result
    result.changes[CACHES] = str(base)
    if base.name == own_name(machine):
        result.temporary = base
    rank = base / f"rank-{local_rank(environ)}"
    for variable, name in VARIABLES.items():
        if not _keeps(variable, environ, machine, base, result):
            result.changes[variable] = str(_made(rank / name))
    _home(environ, machine, base, rank, result)
    return result


def local_rank(environ: Mapping[str, str]) -> str:
    """Place of this process among those of its node, as its launcher says; "0" where there is none."""
    for name in ("LOCAL_RANK", "SLURM_LOCALID"):
        if environ.get(name, "").isdecimal():
            return environ[name]
    return "0"


def own_name(machine: Machine) -> str:
    """Name of the folder of a process that is in no job."""
    return f"fmengine-{machine.uid}-process-{machine.process}"


def job_name(environ: Mapping[str, str], machine: Machine) -> str:
    """Name of the job's folder: the same for all its ranks on a node, no other job's."""
    job, step = environ.get("SLURM_JOB_ID", ""), environ.get("SLURM_STEP_ID", "0")
    run = environ.get("TORCHELASTIC_RUN_ID", "none")  # torchrun's word where no id was given
    if job.isdecimal():
        return f"fmengine-{machine.uid}-slurm-{job}-{step}"
    if run != "none" and run.replace("-", "").replace("_", "").isalnum():
        return f"fmengine-{machine.uid}-torchrun-{run}"
    return own_name(machine)


def unusable(folder: Path, machine: Machine) -> str | None:
    """Why one cannot write in a folder; None where one can. Tries it with a small file."""
    probe = folder / f".fmengine-{machine.process}"
    try:
        if not folder.is_dir():
            return "is no folder here"
        if machine.free_bytes(folder) < ROOM:
            return f"has less than {ROOM >> 20} MB free"
        probe.write_bytes(b"\0" * 4096)  # a quota shows here and not in the free space
        probe.unlink()
    except OSError as error:
        return f"cannot be written to ({error.strerror})"
    return None


def _base(environ: Mapping[str, str], machine: Machine, result: Folders) -> Path | None:
    """The job's folder: the parent process's, or one in the first usable place."""
    inherited = environ.get(CACHES)
    if inherited and _private(Path(inherited), machine) is None:
        return Path(inherited)
    wanted = environ.get("TMPDIR")
    tried = []
    for place in [*([Path(wanted)] if wanted else []), Path("/tmp"), Path("/dev/shm"), machine.cwd]:
        if place in tried:
            continue
        tried.append(place)
        reason = unusable(place, machine)
        base = place / job_name(environ, machine)
        reason = reason or _private(base, machine)
        if reason is None:
            if str(place) != (wanted or "/tmp"):
                result.changes["TMPDIR"] = str(place)
            return base
        if str(place) == wanted:
            result.lines.append(f"TMPDIR={wanted} {reason}: temporary files and caches go elsewhere")
    names = ", ".join(map(str, tried))
    result.problems.append(
        f"no place for temporary files: none of {names} can be written to or has {ROOM >> 20} MB free; set TMPDIR "
        "to a folder that is bound and writable (docker run: --tmpfs /tmp)"
    )
    return None


def _private(base: Path, machine: Machine) -> str | None:
    """Make a folder that only this user can write to; why not, where somebody else has it. Code is loaded from it."""
    try:
        base.mkdir(mode=0o700, exist_ok=True)
        status = base.lstat()
    except OSError as error:
        return f"cannot be written to ({error.strerror})"
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != machine.uid or status.st_mode & 0o022:
        return f"has {base.name}, which others can write to"
    return None


def _keeps(variable: str, environ: Mapping[str, str], machine: Machine, base: Path, result: Folders) -> bool:
    """Whether a cache stays where it is: the user's choice and writable, or part of the image."""
    value = environ.get(variable)
    if variable == BAKED and not value and (machine.prefix / "torch_extensions").is_dir():  # `train` points there
        return True
    if not value or Path(value).is_relative_to(base):  # ours, of the parent process: each rank has its own
        return False
    if Path(value).is_relative_to(machine.prefix):
        return True
    if writable(Path(value), machine):
        return True
    result.lines.append(f"{variable}={value} cannot be written to: it goes to {base}")
    return False


def writable(folder: Path, machine: Machine) -> bool:
    """Whether one can write in a folder, or make it; changes nothing."""
    there = next(place for place in (folder, *folder.parents) if exists(place) or place == place.parent)
    if not (there.is_dir() and os.access(there, os.W_OK | os.X_OK)):
        return False
    try:
        return machine.free_bytes(there) >= ROOM
    except OSError:
        return False


def _home(environ: Mapping[str, str], machine: Machine, base: Path, rank: Path, result: Folders) -> None:
    """A writable HOME, and a name for a user id that has none: libraries ask for both."""
    home = environ.get("HOME")
    unfit = not home or home == "/" or not Path(home).is_dir() or not os.access(home, os.W_OK | os.X_OK)
    if unfit or (home and Path(home).is_relative_to(base)):
        result.changes["HOME"] = str(_made(rank / "home"))
    if machine.user is None and not any(environ.get(name) for name in ("LOGNAME", "USER")):
        result.changes["USER"] = f"user{machine.uid}"


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder
