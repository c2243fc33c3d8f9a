"""Rank 0 prepares while the others wait in the store: they go on, or end in a line."""

import threading
from collections.abc import Callable

import pytest

from fmengine.engine.process_group import after_rank_0, open_store
from fmengine.errors import PeerLostError, UserError
from fmengine.launch.local import free_port


def two_ranks(prepare: Callable[[], None]) -> tuple[BaseException | None, BaseException | None]:
    """What ended the block of rank 0 and of rank 1."""
    port, ends, stores = free_port(), {}, []

    def rank(number: int) -> None:
        store = open_store(rank=number, world_size=2, host="127.0.0.1", port=port)
        stores.append(store)  # rank 0's serves the other as long as it lives
        try:
            with after_rank_0(store, number):
                if number == 0:
                    prepare()
        except BaseException as error:
            ends[number] = error

    threads = [threading.Thread(target=rank, args=(number,)) for number in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return ends.get(0), ends.get(1)


def test_the_others_go_on_when_it_is_done() -> None:
    done = threading.Event()
    assert two_ranks(done.set) == (None, None)
    assert done.is_set()


def test_the_others_end_in_a_line_where_it_failed() -> None:
    def fail() -> None:
        raise UserError("data.train: no such file")

    mine, theirs = two_ranks(fail)
    assert isinstance(mine, UserError)
    assert isinstance(theirs, PeerLostError)
    assert "rank 0 could not prepare the run" in str(theirs)


def test_the_others_end_in_a_line_where_its_process_is_gone() -> None:
    port = free_port()
    store = open_store(rank=0, world_size=2, host="127.0.0.1", port=port)
    other = open_store(rank=1, world_size=2, host="127.0.0.1", port=port)
    del store  # the server ends with rank 0's process
    with pytest.raises(PeerLostError, match="rank 0 is gone"), after_rank_0(other, 1):
        pass
