"""What the fault tests share: the zygote, and a small run that is trained once and copied."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.faults import CONFIG, Zygote, write_inputs


@pytest.fixture(scope="session")
def zygote() -> Iterator[Zygote]:
    """The process that forks commands."""
    with Zygote() as started:
        yield started


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A current directory with train.yaml, data.bin/.idx and a tokenizer in `tokenizer`."""
    write_inputs(tmp_path)
    return tmp_path


@pytest.fixture(scope="session")
def trained(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of train.yaml with checkpoints of steps 2 and 4, to be copied."""
    folder = tmp_path_factory.mktemp("trained")
    write_inputs(folder)
    assert "steps: 4" in CONFIG
    assert zygote.run(folder, "train", "train.yaml").code == 0
    return folder / "run"


@pytest.fixture
def run(folder: Path, trained: Path) -> Path:
    """A copy of the finished run, in the current directory."""
    return Path(shutil.copytree(trained, folder / "run"))


@pytest.fixture
def small_disk(folder: Path) -> Iterator[Path]:
    """A file system of 4 MB at `disk` in the current directory."""
    disk = folder / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "none", disk], capture_output=True).returncode:
        pytest.skip("mounting is not allowed here")
    yield disk
    subprocess.run(["umount", "--lazy", disk], check=True)


@pytest.fixture
def read_only(folder: Path) -> Iterator[Path]:
    """A folder `disk` that cannot be written to."""
    disk = folder / "disk"
    disk.mkdir()
    if os.geteuid() != 0:
        disk.chmod(0o555)
        yield disk
        disk.chmod(0o755)
        return
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "ro", "none", disk], capture_output=True).returncode:
        pytest.skip("mounting is not allowed here, and root may write to every folder")
    yield disk
    subprocess.run(["umount", "--lazy", disk], check=True)
