"""What must be there, by the image's variant; outside an image, what pyproject.toml requires."""

from collections.abc import Iterable
from importlib import metadata

from fmengine.doctor.probes import PROBES

BASE = (
    "python",
    "fmengine",
    "torch",
    "gloo",
    "deepspeed",
    "transformers",
    "tokenizers",
    "safetensors",
    "numpy",
    "pydantic",
    "ruamel.yaml",
    "rich",
    "zstandard",
    "ninja",
)

CUDA = (
    "triton",
    "c-compiler",
    "nccl",
    "rdma-core",
    "deepspeed-fused-adam",
    "flash-attn",
    "apex-fused-adam",
    "apex-layer-norm",
)

VARIANTS = {
    "cpu": (*BASE, "deepspeed-shm-comm"),
    "cuda12": (*BASE, *CUDA),
    "cuda13": (*BASE, *CUDA),
}
"""Variant to the names of its probes. All others are looked at too, and may be absent."""


def expected(variant: str | None) -> frozenset[str]:
    """Names of the probes that must find their component.

    Args:
        variant: the image's; None outside an image. Of one that we do not know, the base is expected.
    """
    if variant is not None:
        return frozenset(VARIANTS.get(variant, BASE))
    return frozenset(("python", "fmengine", "gloo", *required()))


def required() -> dict[str, str]:
    """`requirements` of this installation; none where it runs from its source, not installed."""
    try:
        return requirements(metadata.requires("fmengine") or [])
    except metadata.PackageNotFoundError:
        return {}


def requirements(lines: Iterable[str]) -> dict[str, str]:
    """Names of the packages that are required without an extra, to their whole requirement; those with a probe."""
    from packaging.requirements import Requirement

    found = {}
    for line in lines:
        requirement = Requirement(line)
        plain = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if plain and requirement.name in PROBES:
            found[requirement.name] = str(requirement).partition(";")[0].strip()
    return found


def unfit(requirement: str, version: str) -> bool:
    """Whether an installed version is not what a requirement asks for."""
    from packaging.requirements import Requirement

    return not Requirement(requirement).specifier.contains(version, prereleases=True)
