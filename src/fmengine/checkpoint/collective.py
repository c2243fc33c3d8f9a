"""What the checkpoint code needs of a process group, and how all ranks learn of one rank's failure.

A rank that meets a full disk must not leave the others waiting: `agree` runs a piece of work on
every rank and then either returns on all of them or raises on all of them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from fmengine.errors import UserError

T = TypeVar("T")


class Collective(Protocol):
    """A group of ranks; every method is called by all of them in the same order."""

    @property
    def rank(self) -> int:
        """The rank of this process, from 0."""
        ...

    @property
    def world_size(self) -> int:
        """How many ranks there are."""
        ...

    def barrier(self) -> None:
        """Return once every rank is here."""
        ...

    def gather_object(self, value: Any) -> list[Any] | None:
        """Rank 0 gets every rank's value, in rank order; the others None."""
        ...

    def broadcast_object(self, value: Any) -> Any:
        """Every rank gets rank 0's value."""
        ...


class SingleProcess:
    """The collective of a process that is alone."""

    rank = 0
    world_size = 1

    def barrier(self) -> None:
        """Nobody to wait for."""

    def gather_object(self, value: Any) -> list[Any] | None:
        """The one value."""
        return [value]

    def broadcast_object(self, value: Any) -> Any:
        """The value itself."""
        return value


class TorchCollective:
    """The default process group of torch.distributed, or another one that holds global rank 0 first.

    Objects travel pickled; give it a gloo group where the default one is NCCL and the objects should
    stay off the GPU.
    """

    def __init__(self, group: Any = None) -> None:
        import torch.distributed as dist

        self._dist, self._group = dist, group
        self.rank: int = dist.get_rank(group)
        self.world_size: int = dist.get_world_size(group)

    def barrier(self) -> None:
        """Return once every rank is here."""
        self._dist.barrier(self._group)

    def gather_object(self, value: Any) -> list[Any] | None:
        """Rank 0 gets every rank's value, in rank order; the others None."""
        values: list[Any] | None = [None] * self.world_size if self.rank == 0 else None
        self._dist.gather_object(value, values, dst=0, group=self._group)
        return values

    def broadcast_object(self, value: Any) -> Any:
        """Every rank gets rank 0's value."""
        box = [value if self.rank == 0 else None]
        self._dist.broadcast_object_list(box, src=0, group=self._group)
        return box[0]


@dataclass(frozen=True)
class Failure:
    """One rank's failure, in a form that travels.

    Attributes:
        rank: where it happened.
        by_user: the user can mend it (a full disk, a read-only folder): it becomes a UserError.
        text: one line.
    """

    rank: int
    by_user: bool
    text: str


def agree(collective: Collective, action: Callable[[], T], task: str) -> T:
    """Run `action` on this rank, then return its result on every rank or raise on every rank.

    Args:
        collective: the ranks.
        action: this rank's work; it must itself not leave another rank waiting when it fails.
        task: what is being done, for the message ("saving step 100").

    Raises:
        UserError: on all ranks, when each failure is the system's refusal (OSError) or a UserError.
        RuntimeError: on all ranks otherwise, from the original exception where it happened.
    """
    result, error = _attempt(action)
    failures = collective.gather_object(_describe(error, collective.rank, task))
    if failures is not None:
        failures = [failure for failure in failures if failure is not None]
    failures = collective.broadcast_object(failures)
    if failures:
        text = failures[0].text + (f" (and {len(failures) - 1} more ranks)" if len(failures) > 1 else "")
        if all(failure.by_user for failure in failures):
            raise UserError(text) from error
        raise RuntimeError(text) from error
    return result  # type: ignore[return-value]  # no failure anywhere, so this rank's action returned


def agree_on_first(collective: Collective, action: Callable[[], T], task: str) -> T:
    """`agree` over a piece of work that only rank 0 does; every rank gets its (picklable) result."""
    result = agree(collective, lambda: action() if collective.rank == 0 else None, task)
    return collective.broadcast_object(result)  # type: ignore[no-any-return]


def _attempt(action: Callable[[], T]) -> tuple[T | None, Exception | None]:
    try:
        return action(), None
    except Exception as error:
        return None, error


def _describe(error: Exception | None, rank: int, task: str) -> Failure | None:
    if error is None:
        return None
    if isinstance(error, UserError):
        return Failure(rank, True, str(error))
    if isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename else ""
        return Failure(
            rank,
            True,
            f"{where}{error.strerror or error} while {task} on rank {rank}; free or repair the disk and resume",
        )
    return Failure(rank, False, f"{type(error).__name__}: {error} while {task} on rank {rank}")
