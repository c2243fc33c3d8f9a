"""Reading options of a resolved config."""

from typing import TypeVar

T = TypeVar("T")


def known(value: T | None) -> T:
    """An option that `config.load` has filled: every one that the family uses."""
    assert value is not None, "a model needs a resolved config"
    return value
