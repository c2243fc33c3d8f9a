"""Paths of the host on the command line that are not bound into the container."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from fmengine.start.checks import is_apptainer
from fmengine.start.machine import Machine, exists
from fmengine.start.mounts import bound, is_image

TEXT = ("--prompt", "--eod", "--text-key")
"""Options whose value is text and no path."""

FILES = (".yaml", ".yml", ".json", ".jsonl", ".jsonl.gz", ".jsonl.zst", ".txt")
"""Endings of what is read."""


def problems(arguments: Sequence[str], environ: Mapping[str, str], machine: Machine) -> list[str]:
    """A line for each path that is not in the container because nothing is bound there.

    A path whose place is bound, or that is to be made in a folder which exists, is left to the command.
    """
    found = []
    for word in dict.fromkeys(_words(arguments)):
        path = Path(word)
        line = missing(path, environ, machine) if path.is_absolute() else _missing_here(path, environ, machine)
        if line:
            found.append(line)
    return found


def missing(path: Path, environ: Mapping[str, str], machine: Machine) -> str | None:
    """Why an absolute path is not in the container, and what to bind; None where it is there or could be made."""
    try:
        target = path.resolve()
    except (OSError, RuntimeError, ValueError):  # links in a circle, no name at all: the command says it
        return None
    there = next(place for place in (target, *target.parents) if exists(place))
    if there == target or not is_image(there, machine.prefix, machine.mounts):
        return None
    if there == target.parent and there != Path("/"):  # to be made, or simply not there
        return None
    lost = there / target.relative_to(there).parts[0]
    link = f" (a link to {target})" if target != path else ""
    return f"{path}{link} is not in the container: {_bound(machine)}; add {_option(lost, environ)}"


def _missing_here(path: Path, environ: Mapping[str, str], machine: Machine) -> str | None:
    """A file in the current folder, where that folder is the image's and not the user's."""
    if not path.name.endswith(FILES) or exists(path) or not is_image(machine.cwd, machine.prefix, machine.mounts):
        return None
    if is_apptainer(environ):
        advice = "--bind $PWD --pwd $PWD"
    else:
        advice = f"-v $PWD:{machine.cwd if machine.cwd != Path('/') else '/workspace'}"
        advice += " -w /workspace" if machine.cwd == Path("/") else ""
    return f"{path} is not in {machine.cwd}, a folder of the image: {_bound(machine)}; add {advice}"


def _words(arguments: Sequence[str]) -> list[str]:
    """What could be a path: words, and what follows the last `=` of --option=PATH and of --set KEY=PATH."""
    words, skip = [], False
    for word in arguments[1:]:
        name, _, value = word.rpartition("=")
        if not skip and word not in TEXT and name not in TEXT:
            words.append(value)
        skip = word in TEXT
    return [word for word in words if word and not word.startswith("-")]


def _bound(machine: Machine) -> str:
    places = bound(machine.prefix, machine.mounts)
    return f"bound are {', '.join(map(str, places))}" if places else "nothing of the host is bound"


def _option(folder: Path, environ: Mapping[str, str]) -> str:
    return f"--bind {folder}" if is_apptainer(environ) else f"-v {folder}:{folder}"
