import os
import sys
from pathlib import Path

import pytest

from fmengine.start import machine
from fmengine.start.machine import exists, folders, look, parse_driver

PROPRIETARY = """\
NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.129.03  Thu Oct 19 18:56:32 UTC 2023
GCC version:  gcc version 11.4.0 (Ubuntu 11.4.0-1ubuntu1~22.04)
"""
OPEN = (
    "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build  (dvs-builder@U22-I3)  Sun Jul\n"
)
ARM = "NVRM version: NVIDIA UNIX Open Kernel Module for aarch64  570.133.20  Release Build\n"


@pytest.mark.parametrize(
    ("text", "version"),
    [(PROPRIETARY, "535.129.03"), (OPEN, "580.65.06"), (ARM, "570.133.20"), ("", None), ("GCC version: 12.2.0", None)],
)
def test_the_drivers_version(text: str, version: str | None) -> None:
    assert parse_driver(text) == version


def test_this_machine() -> None:
    found = look({})
    assert found.prefix == Path(sys.prefix)
    assert found.python == sys.version_info[:2]
    assert (found.uid, found.cwd) == (os.getuid(), Path.cwd())
    # two containers that share a folder can have the same process number
    assert found.process == f"{Path('/proc/self/ns/pid').readlink().name[5:-1]}-{os.getpid()}"
    assert found.glibc >= (2, 17)
    assert any(mount.point == Path("/") for mount in found.mounts)
    assert found.free_bytes(Path("/")) >= 0


def test_device_files_are_counted(tmp_path: Path) -> None:
    for name in ("nvidia0", "nvidia1", "nvidia10", "nvidiactl", "nvidia-uvm", "nvidia-caps", "null"):
        (tmp_path / name).touch()
    assert machine._gpu_devices(tmp_path) == 3


def test_a_current_folder_that_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert look({}).cwd == Path("/")


def test_libraries_of_the_host_are_read(tmp_path: Path) -> None:
    import _ctypes

    (tmp_path / "libfabric.so.1").write_bytes(Path(_ctypes.__file__).read_bytes())
    (tmp_path / "notes.so.txt").write_text("no library")
    found = look({"FMENGINE_HOST_LIBRARIES": str(tmp_path)}).host_libraries
    assert [*found] == [tmp_path / "libfabric.so.1"]


def test_libcuda_on_the_library_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "DRIVER_FOLDERS", ())
    environ = {"LD_LIBRARY_PATH": f"/nowhere:{tmp_path}"}
    assert not look(environ).has_libcuda
    (tmp_path / "libcuda.so.1").touch()
    assert look(environ).has_libcuda


def test_small_things() -> None:
    assert folders("/a::/b:") == [Path("/a"), Path("/b")]
    assert not exists(Path("x" * 5000))
    assert exists(Path("/"))
