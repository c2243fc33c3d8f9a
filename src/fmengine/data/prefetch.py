"""Batches made ahead of time by one background thread."""

import dataclasses
import queue
import threading
from collections.abc import Iterator
from types import TracebackType
from typing import Protocol

from fmengine.batch import Batch


class Loader(Protocol):
    """What is read ahead: a pure function of the step."""

    def step(self, step: int) -> list[Batch]:
        """The micro-batches of this rank for an optimizer step."""
        ...


class Prefetch(Iterator[tuple[int, list[Batch]]]):
    """Yields (step, micro-batches) for start_step <= step < stop_step; at most `depth` steps lie ready.

    An exception of the loader is raised where the batch would have come. Use as a context manager, or
    call `close`: it ends the thread, which otherwise waits until the process ends.

    Args:
        loader: where the batches come from; only the thread calls it.
        start_step: first step.
        stop_step: behind the last step.
        depth: steps made ahead.
        pin_memory: give page-locked memory, so that `Batch.to` does not block.
    """

    def __init__(
        self, loader: Loader, start_step: int, stop_step: int, *, depth: int = 2, pin_memory: bool = False
    ) -> None:
        self._loader = loader
        self._pin_memory = pin_memory
        self._ready: queue.SimpleQueue[tuple[int, list[Batch]] | BaseException | None] = queue.SimpleQueue()
        self._room = threading.Semaphore(depth)
        self._closed = False
        steps = range(start_step, stop_step)
        self._thread = threading.Thread(target=self._fill, args=(steps,), name="prefetch", daemon=True)
        self._thread.start()

    def _fill(self, steps: range) -> None:
        try:
            for step in steps:
                self._room.acquire()
                if self._closed:
                    return
                batches = self._loader.step(step)
                self._ready.put((step, [_pin(batch) for batch in batches] if self._pin_memory else batches))
        except BaseException as error:
            self._ready.put(error)
        else:
            self._ready.put(None)

    def __next__(self) -> tuple[int, list[Batch]]:
        if self._closed:
            raise StopIteration
        item = self._ready.get()
        if item is None or isinstance(item, BaseException):
            self.close()
            raise item or StopIteration
        self._room.release()
        return item

    def close(self) -> None:
        """End the thread and drop what lies ready."""
        self._closed = True
        self._room.release()
        self._thread.join()

    def __enter__(self) -> "Prefetch":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _pin(batch: Batch) -> Batch:
    """The batch in page-locked memory."""
    return Batch(**{field.name: getattr(batch, field.name).pin_memory() for field in dataclasses.fields(batch)})
