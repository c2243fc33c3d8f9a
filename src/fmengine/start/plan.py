"""What the start does, as a value: nothing here changes the process."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fmengine.start import checks, paths
from fmengine.start.clean import clean
from fmengine.start.folders import choose
from fmengine.start.machine import Machine
from fmengine.start.site import SITE, read_site
from fmengine.start.variants import IMAGE

ON_GPUS = ("train",)
"""Commands that need what the variant is for; the others run on a login node too."""

OFFLINE = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE")
"""Any of them that the user has set is an answer for all."""


@dataclass(frozen=True)
class Start:
    """What to do before the command.

    Attributes:
        changes: variable to its new value; None takes it away.
        lines: what to say, on rank 0.
        problems: why the command cannot work here; a line each.
        restart: whether Python has to start again, with the changed environment.
        packages: folder to add to the end of Python's path.
        temporary: folder to remove when this process ends.
    """

    changes: Mapping[str, str | None]
    lines: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()
    restart: bool = False
    packages: Path | None = None
    temporary: Path | None = None


def plan(environ: Mapping[str, str], arguments: Sequence[str], machine: Machine) -> Start:
    """Decide all that the start does. It makes the folders that it names; nothing else is changed.

    Args:
        environ: the process's environment.
        arguments: the command line without the program's name; the first word is the command.
        machine: from `machine.look`.
    """
    if IMAGE not in environ:
        return Start(changes={})
    cleaned, folders = clean(environ, machine), choose(environ, machine)
    changes = cleaned.changes | folders.changes
    if not any(name in environ for name in OFFLINE):
        changes |= dict.fromkeys(OFFLINE, "1")
        changes["HF_HUB_DISABLE_TELEMETRY"] = "1"
    lines = [f"left out, as it is the host's: {'; '.join(cleaned.cut)}"] if cleaned.cut else []
    site = read_site(environ[SITE], machine) if environ.get(SITE) else None
    problems = [*folders.problems, *([site.problem] if site and site.problem else [])]
    problems += paths.problems(arguments, environ, machine)
    if arguments and arguments[0] in ON_GPUS:
        problems += checks.problems(environ[IMAGE], environ, arguments, machine)
    different = {name: value for name, value in changes.items() if environ.get(name) != value}
    return Start(
        changes=different,
        lines=(*lines, *folders.lines),
        problems=tuple(problems),
        restart=cleaned.restart,
        packages=site.folder if site else None,
        temporary=folders.temporary,
    )
