"""What the image tests share: a dockerd, the images that it built, and a small run's inputs."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.docker import USER, Docker, Image, build, daemon
from support.faults import write_inputs
from support.locks import ROOT


@pytest.fixture(scope="session")
def docker() -> Iterator[Docker]:
    """A real dockerd; its files stay in build/docker for the next time."""
    with daemon(ROOT / "build" / "docker") as client:
        yield client


@pytest.fixture(scope="session")
def cpu_image(docker: Docker, tmp_path_factory: pytest.TempPathFactory) -> Image:
    """The cpu image, as `fmengine:cpu` in `docker`."""
    return build(docker, "cpu", tmp_path_factory.mktemp("secrets"))


@pytest.fixture
def owned(tmp_path: Path) -> Path:
    """A folder of the user `USER`, that any user can reach."""
    folder = tmp_path / "owned"
    folder.mkdir()
    for above in [folder, *folder.parents]:  # pytest's own are for their user alone
        if above.stat().st_uid == os.geteuid() and above.is_relative_to(tmp_path.parents[1]):
            above.chmod(above.stat().st_mode | 0o055)
    os.chown(folder, USER, USER)
    return folder


@pytest.fixture
def inputs(tmp_path: Path) -> Path:
    """A folder with train.yaml, data.bin/.idx and tokenizer/: a run of 4 steps that takes seconds."""
    folder = tmp_path / "inputs"
    folder.mkdir()
    write_inputs(folder)
    for path in [folder, *folder.rglob("*")]:
        path.chmod(0o755 if path.is_dir() else 0o644)
    return folder
