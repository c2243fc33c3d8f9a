"""A checkpoint of a pretend engine: two small files a rank."""

import io
import json
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from fmengine.checkpoint.collective import SingleProcess
from fmengine.checkpoint.manifest import Header, Layout, fingerprint
from fmengine.checkpoint.save import save
from fmengine.config.model import ModelConfig

MODEL = ModelConfig(family="llama", vocab_size=32, hidden_size=8, num_hidden_layers=1, num_attention_heads=2)


def header(step: int, model: ModelConfig = MODEL) -> Header:
    return Header(
        step=step,
        samples=16 * step,
        config={"model": model.model_dump(mode="json")},
        versions={"fmengine": "0"},
        layout=Layout(world_size=1, zero_stage=1, precision="fp32"),
        model_fingerprint=fingerprint(model),
        rng={"seed": 1},
    )


def write_state(step: int, rank: int = 0) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / "state").mkdir(exist_ok=True)
        (folder / "state" / f"rank-{rank}.pt").write_bytes(bytes([step % 256]) * 1000)
        if rank == 0:
            (folder / "layout.json").write_text(json.dumps({"step": step}))

    return write


def save_step(run: Path, step: int, keep: int = 2, **keys: Any) -> Path:
    return save(run, header(step), write_state(step), collective=SingleProcess(), keep=keep, **keys)


def content(checkpoint: Path) -> int:
    """Which step's state is really in there."""
    return (checkpoint / "engine" / "state" / "rank-0.pt").read_bytes()[0]


class ThreadRanks:
    """Ranks as threads of this process; a rank that stays away breaks the barrier instead of hanging."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.meeting = threading.Barrier(world_size, timeout=10)
        self.box: list[Any] = [None] * world_size

    def run(self, work: Callable[["ThreadRank"], Any]) -> list[Any]:
        """Each rank's result, or the exception it raised."""

        def attempt(rank: int) -> Any:
            try:
                return work(ThreadRank(self, rank))
            except Exception as error:
                return error

        with ThreadPoolExecutor(self.world_size) as pool:
            return list(pool.map(attempt, range(self.world_size)))


class ThreadRank:
    def __init__(self, ranks: ThreadRanks, rank: int) -> None:
        self.ranks, self.rank, self.world_size = ranks, rank, ranks.world_size

    def barrier(self) -> None:
        self.ranks.meeting.wait()

    def gather_object(self, value: Any) -> list[Any] | None:
        self.ranks.box[self.rank] = value
        self.barrier()
        values = list(self.ranks.box) if self.rank == 0 else None
        self.barrier()
        return values

    def broadcast_object(self, value: Any) -> Any:
        if self.rank == 0:
            self.ranks.box[0] = value
        self.barrier()
        value = self.ranks.box[0]
        self.barrier()
        return value


class Killed(BaseException):
    """The process is gone: nothing it would still do happens."""


class Faults:
    """Counts the operations that change the disk and fails one of them, through pytest's monkeypatch.

    Args:
        monkeypatch: pytest's.
        fail_at: index of the operation that fails, from 0.
        error: what it raises; after a `Killed` every later operation raises too.
        after: the operation still happens before it raises.
    """

    def __init__(self, monkeypatch: Any, fail_at: int, error: BaseException, after: bool = False) -> None:
        self.count, self.fail_at, self.error, self.after = 0, fail_at, error, after
        for name in ("mkdir", "fsync", "rename", "replace", "unlink", "rmdir"):
            monkeypatch.setattr(os, name, self._wrap(getattr(os, name)))
        original = io.open

        def opened(file: Any, mode: str = "r", *args: Any, **keys: Any) -> Any:
            if "r" in mode:
                return original(file, mode, *args, **keys)
            return self._wrap(original)(file, mode, *args, **keys)

        monkeypatch.setattr(io, "open", opened)

    def _wrap(self, operation: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **keys: Any) -> Any:
            index, self.count = self.count, self.count + 1
            if index == self.fail_at or (index > self.fail_at and isinstance(self.error, Killed)):
                if self.after and index == self.fail_at:
                    operation(*args, **keys)
                raise self.error
            return operation(*args, **keys)

        return counted
