"""The monitor: takes the results of steps, reads them off the device once an interval, and tells what they were."""

import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

import torch
from torch import Tensor

from fmengine.engine.protocol import StepResult
from fmengine.monitor.chips import Device
from fmengine.monitor.console import Console, LiveConsole, PlainConsole, line
from fmengine.monitor.metrics import MetricsFile, Rates, StepRecord

_log = logging.getLogger(__name__)


class Monitor:
    """What the loop tells of a run. Every rank has one; rank 0's also prints and writes metrics.jsonl.

    Results of steps are kept on the device and read together: once every `log_interval` steps, at the first step, at
    the last, and before a pause. That read is the only synchronisation. Every rank reads at the same steps.

    Args:
        run_dir: the run folder, there already.
        rank: this rank.
        world_size: number of ranks, each with one device.
        device: this rank's device.
        flops_per_token: model FLOPs of training on one token, forward and backward, without recomputation.
        samples_per_step: the global batch size.
        tokens_per_sample: the sequence length.
        log_interval: steps between reads.
        stream: where rank 0 prints.
        terminal: whether that is a terminal, for a live line in place of many.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        rank: int,
        world_size: int,
        device: Device,
        flops_per_token: float,
        samples_per_step: int,
        tokens_per_sample: int,
        log_interval: int,
        stream: TextIO,
        terminal: bool,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._path = run_dir / "metrics.jsonl"
        self._rank, self._world_size, self._device = rank, world_size, device
        self._flops_per_token = flops_per_token
        self._samples_per_step, self._tokens_per_sample = samples_per_step, tokens_per_sample
        self._log_interval = log_interval
        self._clock = clock
        self._console: Console | None = None
        if rank == 0:
            self._console = LiveConsole(stream) if terminal else PlainConsole(stream, device.kind, world_size)
        self._metrics: MetricsFile | None = None
        self._steps = 0
        self._pending: list[tuple[int, StepResult]] = []
        self._measured_from: float | None = None
        self._first_step: tuple[int, float] | None = None
        self._first_non_finite: int | None = None

    @property
    def first_non_finite(self) -> int | None:
        """The first step read so far whose loss, or the norm of a gradient that was used, is not finite."""
        return self._first_non_finite

    def start(self, step: int, steps: int) -> None:
        """The run goes on from `step` (0: from the start) to `steps`; later rows of metrics.jsonl are cut off."""
        self._steps = steps
        if self._console:
            self._metrics = MetricsFile(self._path, step)
            self._metrics.write([{"kind": "start", "step": step, "world_size": self._world_size}])
            self._console.start(step, steps)
        where = f"{self._world_size} x {self._device.name}"
        self._say(f"{'starting' if step == 0 else f'going on from step {step}'}: {steps} steps on {where}")

    def step(self, result: StepResult, step: int) -> None:
        """Optimizer step number `step` (1 is the first) was taken; the result's tensors must not change any more."""
        self._pending.append((step, result))
        if self._console:
            self._console.advance(step)
        if self._first_step is None:
            self._read()
            self._first_step = step, self._clock()
            self._measured_from = self._clock()
        elif step % self._log_interval == 0 or step == self._steps:
            self._read()

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Around a validation or a checkpoint, whose time is no part of the rates; reads what is pending first."""
        if self._pending:
            self._read()
        try:
            yield
        finally:
            if self._first_step is not None:
                self._measured_from = self._clock()

    def evaluation(self, step: int, loss: float, bits_per_byte: float | None) -> None:
        """A validation after `step` steps: mean loss in nats per token, and bits per byte where known."""
        self._row({"kind": "eval", "step": step, "loss": loss, "bits_per_byte": bits_per_byte})
        per_byte = "" if bits_per_byte is None else f"  {bits_per_byte:.4f} bits per byte"
        self._say(f"validation at step {step}: loss {loss:.4f}{per_byte}")

    def checkpoint(self, step: int, folder: Path, seconds: float) -> None:
        """A checkpoint of `step` is whole in `folder`; writing it took `seconds`."""
        self._row({"kind": "checkpoint", "step": step, "folder": str(folder), "seconds": seconds})
        self._say(f"checkpoint at step {step}: {folder} ({seconds:.1f} s)")

    def finish(self) -> None:
        """Read what is pending and close; call it on every way out of the loop that keeps the process."""
        try:
            if self._pending:
                self._read()
        finally:  # a device that has failed gives nothing more
            if self._console:
                self._console.close()
            if self._metrics:
                self._metrics.close()

    def _read(self) -> None:
        """Read every pending step off the device (this synchronises), write the rows, show the last."""
        pending, self._pending = self._pending, []
        losses = _numbers([result.loss for _, result in pending])
        norms = _numbers([result.grad_norm for _, result in pending])
        targets = _numbers([result.target_tokens for _, result in pending])
        now = self._clock()
        rates = None if self._measured_from is None else self._rates(len(pending), now - self._measured_from)
        if self._measured_from is not None:
            self._measured_from = now
        memory = self._device.peak_memory()
        records = [
            StepRecord(
                step=step,
                loss=loss,
                learning_rate=result.learning_rate,
                grad_norm=norm,
                target_tokens=int(target),
                samples=step * self._samples_per_step,
                skipped=result.skipped,
                rates=rates,
                peak_memory=memory,
            )
            for (step, result), loss, norm, target in zip(pending, losses, norms, targets, strict=True)
        ]
        self._warn_not_finite(records)
        if self._metrics:
            self._metrics.write([record.row() for record in records])
        seconds_left = self._seconds_left(records[-1].step, now)
        _log.info("%s", line(records[-1], self._steps, self._device.kind, self._world_size, seconds_left))
        if self._console:
            self._console.record(records[-1], seconds_left)

    def _rates(self, steps: int, seconds: float) -> Rates:
        tokens = steps * self._samples_per_step * self._tokens_per_sample / max(seconds, 1e-9)
        flops = tokens * self._flops_per_token / self._world_size
        peak = self._device.peak_flops
        return Rates(tokens, tokens / self._world_size, flops / 1e12, flops / peak if peak else None)

    def _seconds_left(self, step: int, now: float) -> float | None:
        """From the time a step took since the first, validations and checkpoints included."""
        if self._first_step is None or step <= self._first_step[0]:
            return None
        first, then = self._first_step
        return (now - then) / (step - first) * (self._steps - step)

    def _warn_not_finite(self, records: Sequence[StepRecord]) -> None:
        for record in records:
            # A step that fp16's loss scaler threw away is ordinary, and so is its infinite norm.
            if record.skipped or (math.isfinite(record.loss) and math.isfinite(record.grad_norm)):
                continue
            if self._first_non_finite is None:
                self._first_non_finite = record.step
            # Every rank knows the same loss: one says it aloud.
            level = logging.WARNING if self._rank == 0 else logging.INFO
            _log.log(level, "step %d: loss is %s, gradient norm %s", record.step, record.loss, record.grad_norm)

    def _row(self, row: dict[str, object]) -> None:
        if self._metrics:
            self._metrics.write([row])

    def _say(self, text: str) -> None:
        _log.info("%s", text)
        if self._console:
            self._console.message(text)


def _numbers(values: Sequence[Tensor | float]) -> list[float]:
    """Scalars from the device in one copy; float64 holds a float32 and a token count exactly."""
    if not any(isinstance(value, Tensor) for value in values):
        return [float(value) for value in values]
    device = next(value.device for value in values if isinstance(value, Tensor))
    return torch.stack(
        [torch.as_tensor(value, dtype=torch.float64, device=device).detach().reshape(()) for value in values]
    ).tolist()
