"""metrics.jsonl: one JSON object a line, every step once, however often the run was killed and resumed."""

import errno
import json
import logging
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fmengine.errors import UserError

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Rates:
    """Speed over some steps, without the first step of the process, evaluations and checkpoints.

    Attributes:
        tokens_per_second: of the whole run, every position of every sample counted.
        tokens_per_second_per_device: the same over the number of ranks.
        tflops_per_device: model FLOPs (no recomputation), in 1e12 a second and a rank.
        mfu: model FLOPs utilisation, the share of the chip's dense peak (Chowdhery et al. 2022, arXiv:2204.02311,
            appendix B); None where the peak is not known.
    """

    tokens_per_second: float
    tokens_per_second_per_device: float
    tflops_per_device: float
    mfu: float | None


@dataclass(frozen=True)
class StepRecord:
    """One optimizer step, read off the device.

    Attributes:
        step: how many optimizer steps have been taken with it.
        loss: nats per target token of the global batch.
        learning_rate: what the update used.
        grad_norm: global L2 norm before clipping.
        target_tokens: targets in the global batch.
        samples: samples seen since the start of the run, this step's included.
        skipped: fp16's loss scaler threw the step away.
        rates: averaged over the steps that were read together; None for the first step after a start.
        peak_memory: bytes on this rank.
    """

    step: int
    loss: float
    learning_rate: float
    grad_norm: float
    target_tokens: int
    samples: int
    skipped: bool
    rates: Rates | None
    peak_memory: int

    def row(self) -> dict[str, Any]:
        """The step as a row of metrics.jsonl."""
        rates = self.rates
        return {
            "kind": "train",
            "step": self.step,
            "loss": self.loss,
            "learning_rate": self.learning_rate,
            "grad_norm": self.grad_norm,
            "target_tokens": self.target_tokens,
            "samples": self.samples,
            "skipped": self.skipped,
            "tokens_per_second": rates.tokens_per_second if rates else None,
            "tokens_per_second_per_device": rates.tokens_per_second_per_device if rates else None,
            "tflops_per_device": rates.tflops_per_device if rates else None,
            "mfu": rates.mfu if rates else None,
            "peak_memory_bytes": self.peak_memory,
        }


class MetricsFile:
    """Appends rows to metrics.jsonl; what a killed process left behind the resumed step is cut off first.

    A row that cannot be written (a full disk) is a warning, not the end of the run.

    Args:
        path: the file; made if it is not there.
        step: the step the run goes on from; rows of later steps are removed.

    Raises:
        UserError: where the file cannot be opened or rewritten.
    """

    def __init__(self, path: Path, step: int) -> None:
        self._path = path
        try:
            cut(path, step)
            self._file = path.open("ab", buffering=0)
        except OSError as error:
            raise UserError(f"run.dir: cannot write {path} ({error.strerror}); make room or choose another") from None

    def write(self, rows: list[dict[str, Any]]) -> None:
        """Append rows, each with the time (UTC, ISO 8601); a number that is not finite is written as null."""
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        data = "".join(json.dumps(_finite({**row, "time": now}), allow_nan=False) + "\n" for row in rows).encode()
        end = self._file.seek(0, os.SEEK_END)
        try:
            if self._file.write(data) < len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            self._file.truncate(end)
            _log.warning("%d rows are lost to %s: %s", len(rows), self._path, error.strerror)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def cut(path: Path, step: int) -> None:
    """Remove rows of steps beyond `step` and lines that are no rows (torn by a kill), through an atomic rename."""
    if not path.exists():
        return
    staged = path.with_name(path.name + ".tmp")
    with staged.open("w", encoding="utf-8") as file:
        file.writelines(line for line, of_step in _whole_lines(path) if of_step <= step)
        file.flush()
        os.fsync(file.fileno())
    staged.replace(path)


def _whole_lines(path: Path) -> Iterator[tuple[str, int]]:
    """Each row and its step; a row without one is of step 0."""
    with path.open("rb") as file:
        for raw in file:
            try:
                line = raw.decode()
                row = json.loads(line)
            except ValueError:
                continue
            step = row.get("step", 0) if isinstance(row, dict) else None
            if line.endswith("\n") and isinstance(step, int):
                yield line, step


def _finite(row: Mapping[str, Any]) -> dict[str, Any]:
    return {key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in row.items()}
