import pytest

from fmengine.start.variants import variant_for


@pytest.mark.parametrize(
    ("driver", "architecture", "name"),
    [
        (580, "x86_64", "cuda13"),
        (595, "aarch64", "cuda13"),
        (579, "x86_64", "cuda12"),
        (525, "x86_64", "cuda12"),
        (524, "x86_64", None),
        (570, "aarch64", None),
    ],
)
def test_the_newest_that_a_driver_runs(driver: int, architecture: str, name: str | None) -> None:
    assert variant_for(driver, architecture) == name
