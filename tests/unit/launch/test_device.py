from pathlib import Path

import pytest

from fmengine.errors import UserError
from fmengine.launch import device
from fmengine.launch.device import count_gpus, device_of, installed_gpus


@pytest.mark.parametrize(
    ("visible", "installed", "count"),
    [
        (None, 4, 4),
        (None, 0, 0),
        ("", 4, 0),
        ("-1", 4, 0),
        ("NoDevFiles", 4, 0),
        ("0", 4, 1),
        ("2,3", 4, 2),
        (" 0, 1 ", 4, 2),
        ("0,7,1", 4, 1),  # CUDA's list ends at the first invalid entry
        ("0,-1,1", 4, 1),
        ("0,1", 0, 0),
        ("GPU-8932f937,GPU-1b2c", 4, 2),
        ("MIG-6f6ea4d0", 1, 1),
    ],
)
def test_visible_gpus(visible: str | None, installed: int, count: int) -> None:
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert count_gpus(environ, lambda: installed) == count


@pytest.mark.parametrize(
    ("local_rank", "local_world_size", "gpus", "name"),
    [
        (0, 1, 0, "cpu"),
        (3, 4, 0, "cpu"),
        (0, 1, 1, "cuda:0"),
        (3, 4, 1, "cuda:0"),
        (3, 4, 4, "cuda:3"),
        (1, 2, 8, "cuda:1"),
    ],
)
def test_the_device_of_a_rank(local_rank: int, local_world_size: int, gpus: int, name: str) -> None:
    assert device_of(local_rank, local_world_size, gpus) == name


def test_more_ranks_than_gpus() -> None:
    with pytest.raises(UserError, match=r"LOCAL_WORLD_SIZE=4: more processes on this node than GPUs \(2\); start 2"):
        device_of(0, 4, 2)


def nvidia_smi(folder: Path, script: str) -> None:
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)


def test_nvidia_smi_is_asked_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(device, "DRIVER", tmp_path)
    nvidia_smi(tmp_path, "echo 'GPU 0: H200 (UUID: GPU-1)'; echo '  MIG 1g (UUID: MIG-1)'; echo 'GPU 1: H200'")
    assert installed_gpus() == 2
    nvidia_smi(tmp_path, "echo 'No devices were found'; exit 6")
    assert installed_gpus() == 0


def test_a_sick_gpu_is_not_taken_for_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run would go on in silence on the CPU."""
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "gpus" / "0000:1b:00.0").mkdir(parents=True)
    monkeypatch.setattr(device, "DRIVER", tmp_path / "gpus")
    nvidia_smi(tmp_path, "echo 'Unable to determine the device handle for GPU0'; exit 255")
    assert installed_gpus() == 1
    (tmp_path / "nvidia-smi").write_bytes(b"\x7fELF of another machine")
    assert installed_gpus() == 1
    monkeypatch.setattr(device, "DRIVER", tmp_path / "none")
    assert installed_gpus() == 0


def test_the_drivers_list_stands_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(device, "DRIVER", tmp_path)
    (tmp_path / "0000:1b:00.0").mkdir()
    (tmp_path / "0000:2b:00.0").mkdir()
    assert installed_gpus() == 2
    monkeypatch.setattr(device, "DRIVER", tmp_path / "none")
    assert installed_gpus() == 0
