"""A SIF as its users start it: through spython's client, as root and as a user with no subordinate ids."""

import contextlib
import os
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from spython.main import Client

from support.docker import LIMIT
from support.locks import ROOT

NAME = "fmengine-test"
"""The user that is made for these tests."""

CLEAN = ("--cleanenv", "--no-home")
OFFLINE = ("--net", "--network", "none")
WAYS = ("run", "exec")


@dataclass(frozen=True)
class Done:
    """How a container ended; the text is its standard output and then its standard error, as spython has it."""

    code: int
    text: str


@dataclass(frozen=True)
class Container:
    """A SIF and who starts it.

    Attributes:
        sif: the file.
        home: where one stands when starting it, and HOME.
        programs: folder before all others in PATH, with an `apptainer` that becomes another user first; None for root.
        uid: of that user.
    """

    sif: Path
    home: Path
    programs: Path | None = None
    uid: int = 0

    @property
    def environ(self) -> dict[str, str]:
        """What Apptainer is started with."""
        places = [str(self.programs)] if self.programs else []
        return {"PATH": ":".join([*places, "/usr/sbin:/usr/bin:/sbin:/bin"]), "HOME": str(self.home)}

    def fmengine(
        self, way: str, *arguments: str, options: Sequence[str] = (), environ: Mapping[str, str] | None = None
    ) -> Done:
        """A command of fmengine by `apptainer run` or by `apptainer exec`."""
        if way == "run":
            return self.run(*arguments, options=options, environ=environ)
        return self.execute("fmengine", *arguments, options=options, environ=environ)

    def run(
        self,
        *arguments: str,
        options: Sequence[str] = (),
        app: str | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> Done:
        """`apptainer run`."""
        what = {"app": app, "options": list(options), "return_result": True, "quiet": True}
        return self._call(lambda: Client.run(str(self.sif), list(arguments), **what), environ)

    def execute(self, *command: str, options: Sequence[str] = (), environ: Mapping[str, str] | None = None) -> Done:
        """`apptainer exec`."""
        what = {"options": list(options), "return_result": True, "quiet": True}
        return self._call(lambda: Client.execute(str(self.sif), list(command), **what), environ)

    def apptainer(self, *arguments: str | Path) -> Done:
        """Any other command of Apptainer."""
        with self.started(*arguments) as process:
            stdout, stderr = process.communicate(timeout=LIMIT)
        return Done(process.returncode, stdout + stderr)

    def started(self, *arguments: str | Path, environ: Mapping[str, str] | None = None) -> "subprocess.Popen[str]":
        """A command of Apptainer that goes on."""
        return subprocess.Popen(
            ["apptainer", *map(str, arguments)],
            env=dict(environ or self.environ),
            cwd=self.home,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def _call(self, call: Callable[[], Any], environ: Mapping[str, str] | None) -> Done:
        Client.quiet = True
        with mock.patch.dict(os.environ, environ or self.environ, clear=True), contextlib.chdir(self.home):
            result = call()
        message = result["message"]
        return Done(result["return_code"], message if isinstance(message, str) else "".join(message))


def build(variant: str, place: str, image: str, out: Path, docker: Mapping[str, str] | None = None) -> None:
    """Build a SIF with `make sif`'s script.

    Args:
        variant: as the script has it, like the next two.
        place: FROM.
        image: IMAGE.
        out: the file to make.
        docker: variables that lead to a dockerd, where it is needed.
    """
    command = [ROOT / "containers" / "sif.sh", variant, place, image, out]
    # Fast rather than small: it is built to be tested.
    environ = {**(docker or os.environ), "MKSQUASHFS": "-comp zstd -Xcompression-level 3"}
    done = subprocess.run(command, env=environ, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:] + done.stdout[-4000:]


@contextlib.contextmanager
def user(folder: Path) -> Iterator[tuple[Path, int]]:
    """A user with no subordinate ids, for as long as it is needed.

    Args:
        folder: gets the user's home and the programs that become this user.

    Yields:
        Folder of the programs; the user's id.
    """
    _command("useradd", "-K", "SUB_UID_COUNT=0", "-K", "SUB_GID_COUNT=0", "-m", "-d", str(folder / "home"), NAME)
    try:
        assert not any(line.startswith(f"{NAME}:") for line in Path("/etc/subuid").read_text().splitlines())
        programs = folder / "programs"
        programs.mkdir()
        for name in ("apptainer", "singularity"):  # spython calls it by its old name
            become = f"setpriv --reuid {NAME} --regid {NAME} --clear-groups /usr/bin/apptainer"
            (programs / name).write_text(f'#!/bin/sh\nexec {become} "$@"\n')
            (programs / name).chmod(0o755)
        yield programs, int(_command("id", "-u", NAME))
    finally:
        _command("userdel", NAME)


def _command(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
