"""What the monitor knows of a rank's device: its name, its peak memory, and its peak FLOP/s where the chip is known."""

import re
import resource
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

Precision = Literal["bf16", "fp16", "fp32"]

_16BIT: tuple[Precision, ...] = ("bf16", "fp16")
_PEAKS: tuple[tuple[str, float, tuple[Precision, ...]], ...] = (
    # NVIDIA V100 datasheet: 125 (SXM2), 112 (PCIe), 130 (V100S); its tensor cores know fp16 alone.
    (r"V100S", 130e12, ("fp16",)),
    (r"V100-SXM", 125e12, ("fp16",)),
    (r"V100-PCIE", 112e12, ("fp16",)),
    # NVIDIA A100 datasheet: 312. The name must end in a catalogue size: others, as Leonardo's, are custom chips.
    (r"A100.*[48]0GB", 312e12, _16BIT),
    # NVIDIA H100 datasheet: 1513 (PCIe), 1671 (NVL), 1979 (SXM), all with sparsity, so half of that.
    (r"H100 PCIe", 756.5e12, _16BIT),
    (r"H100 NVL", 835.5e12, _16BIT),
    (r"H100", 989.5e12, _16BIT),
    # NVIDIA H200 datasheet: 1671 (NVL), 1979 (SXM) with sparsity.
    (r"H200 NVL", 835.5e12, _16BIT),
    (r"(?<!G)H200", 989.5e12, _16BIT),
    # NVIDIA GH200 datasheet: 1979 with sparsity.
    (r"GH200", 989.5e12, _16BIT),
)
"""Pattern in the device's name, dense matrix FLOP/s, precisions that reach it. The first match counts."""


def peak_flops(device_name: str, precision: Precision) -> float | None:
    """Dense peak in FLOP/s of one device from its datasheet; None where the chip or the precision is not in the table.

    Args:
        device_name: as CUDA reports it, for example "NVIDIA H100 80GB HBM3".
        precision: of the matrix products. fp32 has no entry: whether TF32 is used is not known here.
    """
    for pattern, peak, precisions in _PEAKS:
        if re.search(pattern, device_name):
            return peak if precision in precisions else None
    return None


@dataclass(frozen=True)
class Device:
    """The device of one rank.

    Attributes:
        name: as the driver reports it, or "CPU".
        kind: what one rank is, for "tokens/s/GPU".
        peak_flops: dense peak in FLOP/s, or None where it is not known.
        peak_memory: the most bytes held so far: allocated by torch on the GPU, resident in the process on the CPU.
    """

    name: str
    kind: Literal["GPU", "process"]
    peak_flops: float | None
    peak_memory: Callable[[], int]


def describe(device: torch.device, precision: Precision) -> Device:
    """What is known of this rank's device; asking for its peak memory does not synchronise."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        return Device(name, "GPU", peak_flops(name, precision), lambda: int(torch.cuda.max_memory_allocated(device)))
    # Linux counts ru_maxrss in KiB (getrusage(2)).
    return Device("CPU", "process", None, lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
