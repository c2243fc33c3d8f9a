from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from fmengine.doctor import examine
from fmengine.doctor.examine import gpus, machine_rows, rows_of
from fmengine.doctor.expected import VARIANTS
from fmengine.doctor.rows import Row
from support.machines import machine

FINE = {"state": "ok", "version": "2.13.0", "where": "cpu", "detail": "x"}


def one(variant: str | None, name: str, **result: Any) -> Row:
    (row,) = rows_of({name: {**FINE, **result}}, variant, {"torch": "torch>=2.10"})
    return row


def test_a_component_that_is_fine() -> None:
    assert one("cuda13", "torch") == Row("torch", "ok", True, "2.13.0", "cpu", "x")


@pytest.mark.parametrize("variant", [*VARIANTS, None])
@pytest.mark.parametrize("state", ["absent", "fails"])
def test_a_component_that_is_not(variant: str | None, state: str) -> None:
    row = one(variant, "torch", state=state)
    assert row.wrong
    assert row.advice == (
        f"image {variant} is not whole or was changed: fetch or build it again"
        if variant
        else "pip install 'torch>=2.10'"
    )


def test_what_the_variant_does_not_have_may_fail() -> None:
    row = one("cpu", "flash-attn", state="fails")
    assert (row.wrong, row.advice) == (False, "")
    assert one("cuda12", "flash-attn", state="absent").wrong
    assert not one(None, "flash-attn", state="absent").wrong


def test_a_version_that_is_not_the_required_one() -> None:
    row = one(None, "torch", version="2.9.1")
    assert (row.state, row.detail, row.advice) == ("fails", "torch>=2.10 is required", "pip install 'torch>=2.10'")


def look(tmp_path: Path, variant: str | None, environ: dict[str, str] | None = None, **values: Any) -> dict[str, Row]:
    there = {"HOME": str(tmp_path), "TMPDIR": str(tmp_path), "PATH": str(tmp_path)}
    there |= {"FMENGINE_IMAGE": variant} if variant else {}
    return {row.name: row for row in machine_rows({**there, **(environ or {})}, machine(**values))}


def test_a_machine_that_fits(tmp_path: Path) -> None:
    for variant in ("cpu", None):
        assert not any(row.wrong for row in look(tmp_path, variant).values())
    good = look(tmp_path, "cuda13", gpu_devices=1, has_libcuda=True, driver="580.65.06")
    assert (good["gpu"].state, good["gpu"].version, good["gpu"].expected) == ("ok", "580.65.06", True)


def test_no_gpu(tmp_path: Path) -> None:
    row = look(tmp_path, "cuda13")["gpu"]
    assert (row.state, row.wrong) == ("absent", True)
    assert "start it with --gpus all" in row.advice
    assert not look(tmp_path, "cuda13", {"CUDA_VISIBLE_DEVICES": ""})["gpu"].wrong
    assert not look(tmp_path, None)["gpu"].wrong


def test_an_old_driver(tmp_path: Path) -> None:
    row = look(tmp_path, "cuda13", gpu_devices=1, has_libcuda=True, driver="550.1")["gpu"]
    assert (row.state, row.advice) == ("fails", "use the image cuda12")


def test_the_names_of_the_gpus(tmp_path: Path) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'NVIDIA H200, 580.65.06, 143771 MiB'\n")
    program.chmod(0o755)
    environ = {"PATH": str(tmp_path)}
    assert gpus(environ) == ["NVIDIA H200, 580.65.06, 143771 MiB"]
    program.write_text("#!/bin/sh\necho broken; exit 9\n")
    assert gpus(environ) == []
    program.write_bytes(b"\x7fELF of another machine")
    assert gpus(environ) == []
    assert gpus({"PATH": "/nonexistent"}) == []


def test_shared_memory(tmp_path: Path) -> None:
    small: dict[str, Any] = {"shared_memory": 64 << 20}
    row = look(tmp_path, "cpu", **small)["/dev/shm"]
    assert (row.state, row.version, row.wrong) == ("fails", "64 MB", False)  # one process has room
    assert "--ipc=host" in row.advice
    assert look(tmp_path, "cuda13", gpu_devices=4, has_libcuda=True, **small)["/dev/shm"].wrong


def test_libraries_of_the_host(tmp_path: Path) -> None:
    row = look(tmp_path, "cpu", host_libraries={Path("/h/libx.so"): (2, 99)})["host libraries"]
    assert row.wrong
    assert "needs glibc 2.99" in row.detail


def test_folders(tmp_path: Path) -> None:
    rows = look(tmp_path, "cpu", {"TRITON_CACHE_DIR": "/dev/null/x", "TORCH_EXTENSIONS_DIR": "/opt/fmengine/ext"})
    assert rows["TRITON_CACHE_DIR"].wrong
    assert rows["TRITON_CACHE_DIR"].advice.startswith("set TRITON_CACHE_DIR to a folder")
    assert rows["TORCH_EXTENSIONS_DIR"].detail == "/opt/fmengine/ext (part of the image)"
    assert rows["TMPDIR"].detail == str(tmp_path)
    assert not look(tmp_path, None, {"TRITON_CACHE_DIR": "/dev/null/x"})["TRITON_CACHE_DIR"].wrong
    assert look(tmp_path, "cpu", {"HOME": ""})["HOME"].wrong


def test_what_the_start_found(tmp_path: Path) -> None:
    (row,) = [row for row in machine_rows({"FMENGINE_IMAGE": "cpu"}, machine(), ["no place"]) if row.name == "start"]
    assert (row.wrong, row.detail) == (True, "no place")


def test_an_uninstalled_source_has_no_requirements(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> list[str]:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "requires", missing)
    monkeypatch.setattr(examine, "run_probes", lambda names, environ: {"torch": {**FINE, "version": "0.1"}})
    (row,) = examine.component_rows({})
    assert not row.wrong


def test_every_probe_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(examine, "run_probes", lambda names, environ: dict.fromkeys(names, FINE))
    rows = examine.component_rows({"FMENGINE_IMAGE": "cuda13"})
    assert [row.name for row in rows] == [*examine.PROBES]
    assert {row.name for row in rows if row.expected} == set(VARIANTS["cuda13"])
