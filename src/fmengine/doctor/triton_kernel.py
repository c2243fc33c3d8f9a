"""A Triton kernel for the doctor; Triton wants it in a file, and its names in the module."""

import triton  # type: ignore[import-not-found, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, unused-ignore]


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def double(source, target, length, block: tl.constexpr):  # type: ignore[no-untyped-def]
    """Write twice each of `length` numbers."""
    place = tl.arange(0, block)
    inside = place < length
    tl.store(target + place, 2 * tl.load(source + place, mask=inside), mask=inside)
