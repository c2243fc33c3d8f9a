"""A real dockerd for the image tests, through the project's own scripts; containers as their tests see them."""

import json
import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from support.locks import ROOT, read_versions

SCRIPTS = ROOT / "containers" / "ci"
USER = 12345
"""A user id that no image and no machine has a name for."""

PLAIN = ("--network", "host")
"""This dockerd has no bridge: a container has the host's network or none."""
HARDENED = ("--read-only", "--tmpfs", "/tmp", "--network", "none", "--user", f"{USER}:{USER}")
LIMIT = 600.0
"""Seconds that no command of these tests takes, on a busy machine."""


@dataclass(frozen=True)
class Done:
    """How a command ended."""

    code: int
    stdout: str
    stderr: str


@dataclass(frozen=True)
class Docker:
    """The client of a dockerd, with the variables that lead to it."""

    environ: Mapping[str, str]

    def __call__(self, *arguments: str | Path) -> Done:
        """`docker ARGUMENTS`, to its end."""
        command = ["docker", *map(str, arguments)]
        done = subprocess.run(
            command,
            env=dict(self.environ),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=LIMIT,
            check=False,
        )
        return Done(done.returncode, done.stdout, done.stderr)

    def out(self, *arguments: str | Path) -> str:
        """What a command that has to succeed prints."""
        done = self(*arguments)
        assert done.code == 0, f"docker {arguments}: {done.stderr}{done.stdout}"
        return done.stdout

    def inspect(self, name: str) -> dict[str, Any]:
        """All that is known about an image or a container."""
        found: dict[str, Any] = json.loads(self.out("inspect", name))[0]
        return found


@dataclass(frozen=True)
class Image:
    """An image that was built here.

    Attributes:
        docker: where it is.
        name: its tag.
        variant: "cpu".
        sbom: the list of its parts, beside it.
        secrets: folder of the build's secrets.
        mark: text in each of the secrets that is nowhere else.
        log: what the build said.
    """

    docker: Docker
    name: str
    variant: str
    sbom: Path
    secrets: Path
    mark: str
    log: str

    def run(self, *command: str | Path, options: Sequence[str | Path] = PLAIN) -> Done:
        """`docker run OPTIONS IMAGE COMMAND`, to its end."""
        return self.docker("run", "--rm", *options, self.name, *command)

    def out(self, *command: str | Path, options: Sequence[str | Path] = PLAIN) -> str:
        """What a container that has to succeed prints."""
        done = self.run(*command, options=options)
        assert done.code == 0, f"{command}: {done.stderr}{done.stdout}"
        return done.stdout

    @contextmanager
    def started(self, *command: str | Path, options: Sequence[str | Path] = PLAIN) -> Any:
        """The name of a container that runs in the background, and is removed after."""
        name = f"fmengine-{uuid.uuid4()}"
        self.docker.out("run", "--detach", "--name", name, *options, self.name, *command)
        try:
            yield name
        finally:
            self.docker("rm", "--force", name)


@contextmanager
def daemon(folder: Path) -> Any:
    """A dockerd whose files are in a folder; it stops after."""
    script = SCRIPTS / "docker.sh"
    lines = _script(script, "start", folder).splitlines()
    try:
        yield Docker({**os.environ, **dict(line.split("=", 1) for line in lines)})
    finally:
        _script(script, "stop", folder)


def build(docker: Docker, variant: str, folder: Path) -> Image:
    """Build a variant with `make image`'s script, on a base made here, with this machine's settings as secrets.

    Args:
        docker: where.
        variant: its name.
        folder: for the secrets.
    """
    versions = read_versions()
    suite = versions[f"{variant.upper()}_BASE"].lower()
    base, name = f"fmengine-base:{suite}", f"fmengine:{variant}"
    if docker("image", "inspect", base).code:
        _script(SCRIPTS / "base.sh", suite, base, environ=docker.environ)
    _script(SCRIPTS / "secrets.sh", suite, folder)
    mark = f"mark-{uuid.uuid4()}"
    for secret in folder.iterdir():
        with secret.open("a") as file:
            file.write(f"\n# {mark}\n")
    environ = {**docker.environ, "BASE": base, "SECRETS": str(folder), "IMAGE": name, "WHEELS": str(_wheels(folder))}
    log = _script(ROOT / "containers" / "build.sh", variant, "--network", "host", environ=environ)
    sbom = ROOT / "build" / "images" / variant / "sbom.cdx.json"
    return Image(docker, name, variant, sbom, folder, mark, log)


def _wheels(folder: Path) -> Path:
    """The folder of wheels that pip knows of, where the index has no CPU build of torch; else an empty one."""
    found = subprocess.run(
        [sys.executable, "-m", "pip", "config", "get", "global.find-links"], capture_output=True, text=True, check=False
    )
    for entry in (os.environ.get("PIP_FIND_LINKS") or found.stdout).split():
        if Path(entry).is_dir():
            return Path(entry)
    empty = folder.parent / "no-wheels"
    empty.mkdir()
    return empty


def copy_distributions(names: Sequence[str], folder: Path) -> None:
    """Copy installed pure Python packages into a folder, for PYTHONPATH."""
    for name in names:
        for file in metadata.files(name) or []:
            if ".." not in file.parts:
                target = folder / file
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(str(file.locate()), target)


def _script(script: Path, *arguments: str | Path, environ: Mapping[str, str] | None = None) -> str:
    command = [str(script), *map(str, arguments)]
    done = subprocess.run(
        command, env=environ and dict(environ), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, check=False
    )
    assert done.returncode == 0, f"{' '.join(command)}: exit code {done.returncode}, see standard error above"
    return done.stdout
