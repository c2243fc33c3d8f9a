"""What every test folder may use."""

from collections.abc import Callable, Iterator

import pytest

from support.distributed import WorkerPool


@pytest.fixture(scope="session")
def workers() -> Iterator[Callable[..., WorkerPool]]:
    """`workers(world_size, name="shared")`: the session's pool of that size and name, started at its first call."""
    pools: dict[tuple[int, str], WorkerPool] = {}

    def pool(world_size: int, name: str = "shared") -> WorkerPool:
        return pools.setdefault((world_size, name), WorkerPool(world_size))

    yield pool
    for started in pools.values():
        started.close()
