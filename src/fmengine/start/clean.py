"""Variables of the host that make the image's Python or loader take the host's files."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from fmengine.start.machine import CACHES, HOST_LIBRARIES, NV_LIBRARIES, Machine, exists, folders
from fmengine.start.mounts import is_image

PYTHON = ("PYTHONPATH", "PYTHONHOME", "PYTHONUSERBASE", "PYTHONSTARTUP")
"""What Python reads before our first line."""

ENVIRONMENT_MANAGERS = ("CONDA_", "_CE_", "MAMBA_", "VIRTUAL_ENV", "PYENV_")
"""How the variables of conda, mamba, virtualenv and pyenv begin."""

RUNTIMES = (NV_LIBRARIES, Path("/usr/local/nvidia"))
"""Where Apptainer's --nv and NVIDIA's container runtime put libraries."""


@dataclass
class Cleaned:
    """What to change.

    Attributes:
        changes: variable to its new value; None takes it away.
        cut: what was taken away, in words.
        restart: whether Python or the loader have acted on it already.
    """

    changes: dict[str, str | None] = field(default_factory=dict)
    cut: list[str] = field(default_factory=list)
    restart: bool = False


def clean(environ: Mapping[str, str], machine: Machine) -> Cleaned:
    """What of the environment is not the image's."""
    result = Cleaned()
    _cut_python(environ, machine, result)
    _cut_managers(environ, machine, result)
    for name in ("LD_PRELOAD", "LD_LIBRARY_PATH"):
        _cut_libraries(name, environ, machine, result)
    return result


def _cut_python(environ: Mapping[str, str], machine: Machine, result: Cleaned) -> None:
    for name in PYTHON:
        if name in environ:
            result.changes[name] = None
            if environ[name]:
                result.cut.append(f"{name}={environ[name]}")
                result.restart |= not machine.ignores_environment
    own = Path(environ.get("HOME", "/")) / ".local/lib/python{}.{}/site-packages".format(*machine.python)
    if exists(own) and CACHES not in environ:  # said once, and not again by a child process
        result.cut.append(str(own))
    result.restart |= machine.uses_user_site
    result.changes["PYTHONNOUSERSITE"] = "1"


def _cut_managers(environ: Mapping[str, str], machine: Machine, result: Cleaned) -> None:
    """Drop conda and the like, with their folders in PATH."""
    if environ.get("VIRTUAL_ENV") == str(machine.prefix):  # the image's own
        names = []
    else:
        names = [name for name in environ if name.startswith(ENVIRONMENT_MANAGERS)]
    if not names:
        return
    result.changes |= dict.fromkeys(names)
    shown = [name for name in ("CONDA_PREFIX", "MAMBA_ROOT_PREFIX", "VIRTUAL_ENV", "PYENV_ROOT") if environ.get(name)]
    result.cut += [f"{name}={environ[name]}" for name in shown] or [", ".join(sorted(names))]
    roots = [Path(environ[name]) for name in shown]
    path = folders(environ.get("PATH", ""))
    kept = [folder for folder in path if not any(folder.is_relative_to(root) for root in roots)]
    if len(kept) < len(path):
        result.changes["PATH"] = ":".join(map(str, kept))


def _cut_libraries(name: str, environ: Mapping[str, str], machine: Machine, result: Cleaned) -> None:
    """Entries of LD_PRELOAD (separated by blanks or colons) or LD_LIBRARY_PATH that are the host's."""
    value = environ.get(name)
    if value is None:
        return
    entries = value.replace(" ", ":").split(":") if name == "LD_PRELOAD" else value.split(":")
    trusted = (*RUNTIMES, *folders(environ.get(HOST_LIBRARIES, "")))
    kept = [entry for entry in entries if entry and _belongs(Path(entry), trusted, machine)]
    cut = [entry for entry in entries if entry and entry not in kept]
    if kept != entries:
        result.changes[name] = ":".join(kept) or None
    if cut:
        result.cut.append(f"{name}={':'.join(cut)}")
    # what is not there has done nothing; a bare name was searched for, and "" is the current directory
    result.restart |= any(exists(Path(entry)) or "/" not in entry for entry in cut) or (bool(value) and "" in entries)


def _belongs(entry: Path, trusted: tuple[Path, ...], machine: Machine) -> bool:
    if any(entry.is_relative_to(folder) for folder in trusted):
        return True
    return entry.is_absolute() and exists(entry) and is_image(entry.resolve(), machine.prefix, machine.mounts)
