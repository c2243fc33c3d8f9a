"""Peaks are matched on the names that drivers report."""

import pytest
import torch

from fmengine.monitor.chips import describe, peak_flops


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA A100-SXM4-40GB", 312e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA A100 80GB PCIe", 312e12),
        ("NVIDIA A100-SXM-64GB", None),
        ("NVIDIA H100 80GB HBM3", 989.5e12),
        ("NVIDIA H100 PCIe", 756.5e12),
        ("NVIDIA H100 NVL", 835.5e12),
        ("NVIDIA H200", 989.5e12),
        ("NVIDIA H200 NVL", 835.5e12),
        ("NVIDIA GH200 120GB", 989.5e12),
        ("NVIDIA GeForce RTX 4090", None),
        ("Tesla V100-SXM2-32GB", None),
    ],
)
def test_bf16_peak(name: str, peak: float | None) -> None:
    assert peak_flops(name, "bf16") == peak


def test_the_precision_counts() -> None:
    assert peak_flops("Tesla V100-SXM2-32GB", "fp16") == 125e12
    assert peak_flops("Tesla V100-PCIE-16GB", "fp16") == 112e12
    assert peak_flops("NVIDIA H200", "fp32") is None


def test_the_cpu_has_a_memory_but_no_peak() -> None:
    device = describe(torch.device("cpu"), "bf16")
    assert (device.name, device.kind, device.peak_flops) == ("CPU", "process", None)
    assert 2**24 < device.peak_memory() < 2**40
