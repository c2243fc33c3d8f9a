"""What a probe hands back."""

import shutil
from dataclasses import dataclass

NO_GPU = "imported; no GPU to run it on"


class AbsentError(Exception):
    """The component is not installed."""


@dataclass(frozen=True)
class Found:
    """A component that imports.

    Attributes:
        version: its own, or of the package that it belongs to.
        where: "cpu" or "cuda:0" where a tiny computation ran; "" where none could.
        detail: what else matters, in a few words.
    """

    version: str
    where: str = ""
    detail: str = ""


def gpu() -> str | None:
    """The device of a probe that can use a GPU."""
    import torch

    return "cuda:0" if torch.cuda.is_available() else None


def program(*names: str) -> str:
    """The first program of these that is on PATH."""
    for name in names:
        path = shutil.which(name)
        if path:
            return path
    raise AbsentError(f"none of {', '.join(names)} is on PATH")


def close(value: object, reference: object, tolerance: float) -> None:
    """Compare two tensors, on their largest entry."""
    import torch

    assert isinstance(value, torch.Tensor)
    assert isinstance(reference, torch.Tensor)
    wrong = (value.float() - reference.float()).abs().max().item()
    if not wrong <= tolerance * max(1.0, reference.float().abs().max().item()):
        raise ArithmeticError(f"differs from PyTorch's result by {wrong:.2g}")
