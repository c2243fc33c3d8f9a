import threading

import pytest
import torch

from fmengine.batch import Batch
from fmengine.data.prefetch import Prefetch
from fmengine.errors import UserError


class Counting:
    """A loader whose batches say their step; it fails at one step when told to."""

    def __init__(self, fails_at: int | None = None) -> None:
        self.fails_at = fails_at
        self.made: list[int] = []
        self.progress = threading.Condition()

    def step(self, step: int) -> list[Batch]:
        with self.progress:
            self.made.append(step)
            self.progress.notify_all()
        if step == self.fails_at:
            raise UserError("bad data")
        return [Batch(*[torch.tensor([step])] * 4)]


def test_steps_come_in_order() -> None:
    with Prefetch(Counting(), 3, 8) as prefetch:
        assert [(step, int(batches[0].input_ids)) for step, batches in prefetch] == [(i, i) for i in range(3, 8)]


def test_no_steps_is_an_empty_iterator() -> None:
    with Prefetch(Counting(), 3, 3) as prefetch:
        assert list(prefetch) == []


def test_an_error_comes_at_its_step() -> None:
    prefetch = Prefetch(Counting(fails_at=2), 0, 5)
    assert [next(prefetch)[0], next(prefetch)[0]] == [0, 1]
    with pytest.raises(UserError, match="bad data"):
        next(prefetch)
    assert not prefetch._thread.is_alive()


def test_it_reads_ahead_as_far_as_asked() -> None:
    loader = Counting()
    with Prefetch(loader, 0, 10**6, depth=3) as prefetch:
        with loader.progress:
            assert loader.progress.wait_for(lambda: len(loader.made) == 3, timeout=30)
        next(prefetch)
        with loader.progress:
            assert loader.progress.wait_for(lambda: len(loader.made) == 4, timeout=30)
    assert loader.made == [0, 1, 2, 3]


@pytest.mark.parametrize("taken", [0, 1])
def test_close_ends_the_thread_at_any_moment(taken: int) -> None:
    prefetch = Prefetch(Counting(), 0, 10**6)
    for _ in range(taken):
        next(prefetch)
    prefetch.close()
    prefetch.close()
    assert not prefetch._thread.is_alive()
    assert list(prefetch) == []
