import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fmengine.data.order import Permutation


@given(size=st.integers(1, 5000), seed=st.integers(0, 2**63 - 1), epoch=st.integers(0, 10**6))
def test_it_is_a_bijection_of_every_size(size: int, seed: int, epoch: int) -> None:
    image = Permutation(size, seed, epoch)(np.arange(size))
    assert np.array_equal(np.sort(image), np.arange(size))


@given(size=st.integers(2**33, 2**62), start=st.integers(0, 2**32))
def test_huge_sizes_need_no_memory_and_do_not_collide(size: int, start: int) -> None:
    image = Permutation(size, 1, 2)(np.arange(start, start + 100))
    assert image.min() >= 0
    assert image.max() < size
    assert len(np.unique(image)) == 100


def test_an_element_does_not_depend_on_what_it_is_asked_with() -> None:
    permutation = Permutation(1000, 7, 3)
    whole = permutation(np.arange(1000))
    assert [int(permutation(np.array([i]))[0]) for i in range(1000)] == whole.tolist()
    assert np.array_equal(permutation(np.arange(1000).reshape(10, 100)), whole.reshape(10, 100))


def test_seed_and_epoch_each_give_another_order() -> None:
    orders = {tuple(Permutation(50, seed, epoch)(np.arange(50))) for seed in range(10) for epoch in range(10)}
    assert len(orders) == 100


def test_the_order_never_changes_between_versions() -> None:
    # A resumed run must go on in the order it began with: these values are part of the format.
    assert Permutation(10, 1234, 0)(np.arange(10)).tolist() == GOLDEN


def test_every_place_is_about_equally_likely() -> None:
    # 4000 keys over 16 places: a count's standard deviation is 15.3, so that 6 of them is out of reach of chance.
    size, keys = 16, 4000
    counts = np.zeros((size, size), int)
    for seed in range(keys):
        counts[np.arange(size), Permutation(size, seed, 0)(np.arange(size))] += 1
    assert np.abs(counts - keys / size).max() < 6 * 15.4


def test_neighbours_do_not_stay_neighbours() -> None:
    image = Permutation(100_000, 5, 0)(np.arange(100_000))
    assert np.abs(np.corrcoef(image[:-1], image[1:])[0, 1]) < 0.02
    assert (np.abs(np.diff(image)) == 1).mean() < 1e-3


@pytest.mark.parametrize("size", [0, -1, 2**62 + 1])
def test_impossible_sizes_are_refused(size: int) -> None:
    with pytest.raises(ValueError, match="size"):
        Permutation(size, 0, 0)


GOLDEN = [1, 3, 6, 4, 0, 9, 7, 8, 5, 2]
