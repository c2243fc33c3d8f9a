import ctypes
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fmengine.doctor import probe as probe_module
from fmengine.doctor import probes_gpu, probes_python, probes_system
from fmengine.doctor.found import AbsentError, Found, close, program
from fmengine.doctor.probe import probe


def put(monkeypatch: pytest.MonkeyPatch, outcome: Callable[[], Found]) -> None:
    monkeypatch.setitem(probe_module.PROBES, "x", outcome)


def failing(error: Exception) -> Callable[[], Found]:
    def run() -> Found:
        raise error

    return run


def test_states(monkeypatch: pytest.MonkeyPatch) -> None:
    put(monkeypatch, lambda: Found("1.2", "cpu", "fine"))
    assert probe("x") == {"state": "ok", "version": "1.2", "where": "cpu", "detail": "fine"}
    put(monkeypatch, failing(AbsentError("x is not installed")))
    assert probe("x") == {"state": "absent", "detail": "x is not installed"}
    put(monkeypatch, failing(ImportError("libcudart.so.13: cannot open\nmore")))
    assert probe("x") == {"state": "fails", "detail": "ImportError: libcudart.so.13: cannot open"}
    put(monkeypatch, failing(AssertionError()))
    assert probe("x") == {"state": "fails", "detail": "AssertionError"}


def test_a_package_that_is_not_installed() -> None:
    with pytest.raises(AbsentError, match="no-such-package is not installed"):
        probes_python.load("x", "no-such-package")


def test_a_result_that_differs() -> None:
    close(torch.tensor([100.0]), torch.tensor([100.1]), 1e-2)
    with pytest.raises(ArithmeticError, match=r"differs from PyTorch's result by 0\.1"):
        close(torch.tensor([1.0]), torch.tensor([1.1]), 1e-2)
    with pytest.raises(ArithmeticError, match="nan"):
        close(torch.tensor([float("nan")]), torch.tensor([1.0]), 1e-2)


def test_the_first_program(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(AbsentError, match="none of a, b is on PATH"):
        program("a", "b")
    (tmp_path / "b").write_text("#!/bin/sh\n")
    (tmp_path / "b").chmod(0o755)
    assert program("a", "b") == str(tmp_path / "b")


@pytest.mark.parametrize("name", ["torch", "safetensors", "zstandard", "ninja", "gloo"])
def test_probes_that_compute(name: str) -> None:
    found = probe(name)
    assert found["state"] == "ok", found
    assert found["where"]


def test_torch_that_computes_nonsense(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "arange", lambda *a, **k: torch.full((6,), float("nan")))
    assert probe("torch")["state"] == "fails"


def test_a_compiler_that_does_not_compile(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    compiler = tmp_path / "gcc"
    compiler.write_text("#!/bin/sh\necho 'Python.h: No such file' >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    assert probe("c-compiler")["detail"].endswith("gcc does not compile: Python.h: No such file")


class DeviceList:
    """ibv_get_device_list as ctypes gives it, on a machine with two devices."""

    restype: Any = None

    def __call__(self, count: Any) -> int:
        count._obj.value = 2
        return 1


def test_rdma(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = []

    def library(name: str) -> Any:
        loaded.append(name)
        return SimpleNamespace(ibv_get_device_list=DeviceList(), ibv_free_device_list=lambda devices: None)

    monkeypatch.setattr(probes_system.ctypes, "CDLL", library)
    monkeypatch.setattr(probes_system, "_rdma_version", lambda: "56.1")
    assert probes_system.rdma_core() == Found("56.1", "cpu", "2 RDMA devices")
    assert loaded == [*probes_system.RDMA]
    monkeypatch.setattr(probes_system.ctypes, "CDLL", failing_library)
    with pytest.raises(AbsentError, match="cannot open"):
        probes_system.rdma_core()


def failing_library(name: str) -> ctypes.CDLL:
    raise OSError(f"{name}: cannot open shared object file")


def test_a_package_without_its_compiled_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Apex, which installs without its extensions and says nothing."""
    monkeypatch.setattr(probes_gpu, "load", lambda *names: (None, "0.1"))
    with pytest.raises(RuntimeError, match="amp_C was not compiled"):
        probes_gpu.apex_fused_adam()
    with pytest.raises(RuntimeError, match="fused_layer_norm_cuda was not compiled"):
        probes_gpu.apex_layer_norm()
    with pytest.raises(RuntimeError, match="flash_attn_2_cuda was not compiled"):
        probes_gpu.flash_attn()


def test_where_there_is_no_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes_gpu, "load", lambda *names: (None, "0.1"))
    monkeypatch.setattr(probes_gpu, "gpu", lambda: None)
    monkeypatch.setattr(probes_gpu, "_extension", lambda name: None)
    for run in (probes_gpu.triton, probes_gpu.apex_fused_adam, probes_gpu.flash_attn, probes_gpu.liger_kernel):
        assert run() == Found("0.1", "", "imported; no GPU to run it on")


def test_the_comparisons_on_the_cpu() -> None:
    """What they compare with is right, and another result is refused."""
    probes_gpu._compare_adam(torch.optim.AdamW, "cpu")
    with pytest.raises(ArithmeticError):
        probes_gpu._compare_adam(torch.optim.SGD, "cpu")
    probes_gpu._compare_norm(torch.nn.RMSNorm(64, eps=1e-5), torch.nn.RMSNorm(64, eps=1e-5), "cpu")
    with pytest.raises(ArithmeticError):
        probes_gpu._compare_norm(torch.nn.RMSNorm(64, eps=1e-1), torch.nn.RMSNorm(64, eps=1e-5), "cpu")
