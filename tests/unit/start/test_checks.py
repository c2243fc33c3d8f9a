from pathlib import Path
from typing import Any

import pytest

from fmengine.start.checks import gpu_problems, local_ranks, problems
from support.machines import machine

APPTAINER = {"APPTAINER_CONTAINER": "/images/fmengine.sif"}
NODE: dict[str, Any] = {"gpu_devices": 4, "has_libcuda": True, "driver": "580.65.06"}


def one(variant: str, environ: dict[str, str], arguments: list[str] | None = None, **values: Any) -> str:
    (line,) = problems(variant, environ, arguments or ["train"], machine(**values))
    assert "\n" not in line
    return line


@pytest.mark.parametrize("variant", ["cuda13", "cuda12", "cpu", "another"])
def test_a_machine_that_fits(variant: str) -> None:
    assert problems(variant, {}, ["train"], machine(**NODE)) == []


def test_a_forgotten_option() -> None:
    assert "start it with --gpus all, " in one("cuda13", {})
    line = one("cuda13", APPTAINER, gpu_devices=4, driver="580.65.06")  # /dev is the host's without --nv too
    assert "the machine has an NVIDIA GPU, but this container does not see it; start it with --nv, " in line
    assert "no NVIDIA GPU is visible; start it with --nv" in one("cuda12", APPTAINER)
    assert "this container does not see it" in one("cuda12", {}, driver="580.1")  # /proc shows it under docker


def test_the_cpu_on_purpose() -> None:
    for value in ("", "-1", "NoDevFiles"):
        assert problems("cuda13", {"CUDA_VISIBLE_DEVICES": value}, ["train"], machine()) == []
    assert len(problems("cuda13", {"CUDA_VISIBLE_DEVICES": "0"}, ["train"], machine())) == 1
    assert problems("cpu", {}, ["train"], machine()) == []


@pytest.mark.parametrize(
    ("variant", "driver", "architecture", "words"),
    [
        ("cuda13", "579.99", "x86_64", "driver here is 579.99, and it needs 580 or newer; use the image cuda12"),
        ("cuda13", "570.133.20", "aarch64", "needs 580 or newer; no image runs on it; ask for a newer driver"),
        ("cuda12", "470.1", "x86_64", "needs 525 or newer; no image runs on it"),
    ],
)
def test_an_old_driver(variant: str, driver: str, architecture: str, words: str) -> None:
    assert words in one(variant, {}, gpu_devices=1, has_libcuda=True, driver=driver, architecture=architecture)


@pytest.mark.parametrize(("variant", "driver"), [("cuda13", "580.65.06"), ("cuda12", "525.60.13"), ("cuda13", None)])
def test_a_driver_that_fits(variant: str, driver: str | None) -> None:
    assert gpu_problems(variant, {}, machine(gpu_devices=1, has_libcuda=True, driver=driver)) == []


def test_a_library_that_needs_a_newer_glibc() -> None:
    libraries = {
        Path("/.singularity.d/libs/libcuda.so.1"): (2, 42),
        Path("/host/libfabric.so"): (2, 43),
        Path("/x"): (2, 41),
    }
    line = one("cpu", {}, host_libraries=libraries)
    assert line.startswith("/host/libfabric.so: this library of the host needs glibc 2.43, and the image has 2.41")
    assert (
        problems("cpu", {}, ["train"], machine(host_libraries={Path("/x"): (2, 9), Path("/y"): (2, 36)}, glibc=(2, 36)))
        == []
    )


def test_a_tiny_shared_memory() -> None:
    small = {"shared_memory": 64 << 20}
    line = one("cpu", {}, ["train", "--workers", "2"], **small)
    assert line.startswith("/dev/shm has 64 MB, too little for 2 processes (1 GiB at least); start the container with")
    assert "--ipc=host" in line
    assert "--bind /dev/shm" in one("cpu", {**APPTAINER, "LOCAL_WORLD_SIZE": "4"}, **small)
    assert "for 4 processes" in one("cuda13", {}, **NODE, **small)
    assert problems("cpu", {}, ["train"], machine(**small)) == []
    assert problems("cpu", {"LOCAL_WORLD_SIZE": "2"}, ["train"], machine(shared_memory=1 << 30)) == []
    assert "has 0 MB" in one("cpu", {"LOCAL_WORLD_SIZE": "2"}, shared_memory=None)


@pytest.mark.parametrize(
    ("environ", "arguments", "ranks"),
    [
        ({"LOCAL_WORLD_SIZE": "3", "SLURM_PROCID": "0", "SLURM_STEP_TASKS_PER_NODE": "2"}, [], 3),
        ({"SLURM_PROCID": "0", "SLURM_STEP_TASKS_PER_NODE": "4(x12),3"}, [], 4),
        ({"SLURM_STEP_TASKS_PER_NODE": "4"}, [], 8),  # inherited by what is no task
        ({}, ["train", "--workers=5"], 5),
        ({}, ["train", "--workers", "x"], 8),
        ({"CUDA_VISIBLE_DEVICES": ""}, ["train"], 1),
    ],
)
def test_the_ranks_on_this_node(environ: dict[str, str], arguments: list[str], ranks: int) -> None:
    assert local_ranks(environ, arguments, machine(gpu_devices=8)) == ranks
