"""What the image tests share: a dockerd, the images that it built, the SIF, its users, and a small run's inputs."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.docker import USER, Docker, Image, build, daemon
from support.faults import write_inputs
from support.locks import ROOT
from support.sif import Container, user
from support.sif import build as build_sif


@pytest.fixture(scope="session")
def docker() -> Iterator[Docker]:
    """A real dockerd; its files stay in build/docker for the next time."""
    with daemon(ROOT / "build" / "docker") as client:
        yield client


@pytest.fixture(scope="session")
def cpu_image(docker: Docker, tmp_path_factory: pytest.TempPathFactory) -> Image:
    """The cpu image, as `fmengine:cpu` in `docker`."""
    return build(docker, "cpu", tmp_path_factory.mktemp("secrets"))


@pytest.fixture(scope="session")
def sif(request: pytest.FixtureRequest) -> Path:
    """The cpu SIF, made from the Docker image; or the file that the variable SIF names, in place of it."""
    if os.environ.get("SIF"):
        return Path(os.environ["SIF"]).resolve()
    image: Image = request.getfixturevalue("cpu_image")
    out = ROOT / "build" / "images" / "fmengine-cpu.sif"
    build_sif("cpu", "docker-daemon", image.name, out, image.docker.environ)
    return out


@pytest.fixture(scope="session", params=["root", "user"])
def container(request: pytest.FixtureRequest, sif: Path) -> Iterator[Container]:
    """The SIF as root starts it, and as a user with no subordinate ids; in a folder that is the user's."""
    folder = Path(tempfile.mkdtemp(dir="/var/tmp"))
    folder.chmod(0o755)
    home = folder / "home"
    try:
        if request.param == "root":
            home.mkdir()
            yield Container(sif, home)
        else:
            with user(folder) as (programs, uid):
                home.chmod(0o755)
                yield Container(sif, home, programs, uid)
    finally:
        shutil.rmtree(folder)


@pytest.fixture
def owned(tmp_path: Path) -> Path:
    """A folder of the user `USER`, that any user can reach."""
    folder = tmp_path / "owned"
    folder.mkdir()
    open_to_all(folder, tmp_path.parents[1])
    os.chown(folder, USER, USER)
    return folder


@pytest.fixture
def inputs(tmp_path: Path) -> Path:
    """A folder with train.yaml, data.bin/.idx and tokenizer/: a run of 4 steps that takes seconds."""
    folder = tmp_path / "inputs"
    folder.mkdir()
    write_inputs(folder)
    open_to_all(folder, tmp_path.parents[1])
    for path in [folder, *folder.rglob("*")]:
        path.chmod(0o755 if path.is_dir() else 0o644)
    return folder


def open_to_all(folder: Path, top: Path) -> None:
    """Let any user reach a folder; those that pytest makes, up to the top one, are for their user alone."""
    for above in [folder, *folder.parents]:
        if above.stat().st_uid == os.geteuid() and above.is_relative_to(top):
            above.chmod(above.stat().st_mode | 0o055)
