"""The image's variants, and what each needs from the machine."""

from dataclasses import dataclass

IMAGE = "FMENGINE_IMAGE"
"""Variable baked into every image: the name of its variant."""


@dataclass(frozen=True)
class Variant:
    """An image variant.

    Attributes:
        cuda: whether it computes on GPUs.
        driver: oldest NVIDIA driver branch that runs it; 0 where it needs none.
        architectures: machines that it is built for, as `uname -m` says it.
    """

    cuda: bool
    driver: int
    architectures: tuple[str, ...]


VARIANTS = {
    "cuda13": Variant(cuda=True, driver=580, architectures=("x86_64", "aarch64")),
    "cuda12": Variant(cuda=True, driver=525, architectures=("x86_64",)),
    "cpu": Variant(cuda=False, driver=0, architectures=("x86_64",)),
}
"""Newest first. Drivers: "CUDA Toolkit 11.x, 12.x, and 13.x Driver Version Ranges" of NVIDIA's CUDA Compatibility,
https://docs.nvidia.com/deploy/cuda-compatibility/minor-version-compatibility.html: 13.x >= 580, 12.x >= 525 (any
toolkit of a major release runs on that release's first driver; newer drivers run older toolkits)."""


def variant_for(driver: int, architecture: str) -> str | None:
    """The newest CUDA variant that a driver branch runs on this kind of machine; None where there is none."""
    for name, variant in VARIANTS.items():
        if variant.cuda and driver >= variant.driver and architecture in variant.architectures:
            return name
    return None
