"""Carries out what `plan` decided; the only file here that changes the process."""

import atexit
import os
import shutil
import sys
from collections.abc import MutableMapping, Sequence
from pathlib import Path

from fmengine.errors import UserError
from fmengine.start.machine import look
from fmengine.start.plan import plan

UNHINDERED = "doctor"
"""The command that is there to look at what is wrong."""

HELP = frozenset(("-h", "--help"))


def begin(arguments: Sequence[str], environ: MutableMapping[str, str]) -> None:
    """Prepare the process for a command in an image; may start Python again, in this same process.

    Args:
        arguments: the command line without the program's name; the first word is the command.
        environ: the process's own environment.

    Raises:
        UserError: the command cannot work here.
    """
    start = plan(environ, arguments, look(environ))
    if _speaks(environ):
        for line in start.lines:
            print(f"fmengine: {line}", file=sys.stderr, flush=True)
    for name, value in start.changes.items():
        if value is None:
            environ.pop(name, None)
        else:
            environ[name] = value
    if start.restart:
        os.execve(sys.executable, [sys.executable, "-I", "-m", "fmengine", *arguments], dict(environ))
    if start.temporary is not None:
        atexit.register(_remove, start.temporary, os.getpid())
    if start.packages is not None:
        sys.path.append(str(start.packages))
    if start.problems and arguments[0] != UNHINDERED and not HELP.intersection(arguments):
        raise UserError(start.problems)


def _speaks(environ: MutableMapping[str, str]) -> bool:
    """Whether this process is the first rank, or none."""
    return environ.get("RANK", environ.get("SLURM_PROCID", "0")) == "0"


def _remove(folder: Path, owner: int) -> None:
    if os.getpid() == owner:  # and not a process that was forked from it
        shutil.rmtree(folder, ignore_errors=True)
