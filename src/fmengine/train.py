"""The training loop, top to bottom; it never asks which layout the engine has."""

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from fmengine.batch import Batch
from fmengine.engine.protocol import EvalResult, TrainEngine
from fmengine.errors import UserError
from fmengine.monitor import Monitor


@dataclass(frozen=True)
class FitPlan:
    """When the loop does what; all in optimizer steps, an interval of 0 meaning only at the end.

    Attributes:
        steps: steps in the whole run.
        eval_interval: steps between validations.
        checkpoint_interval: steps between checkpoints.
    """

    steps: int
    eval_interval: int
    checkpoint_interval: int

    def evaluates(self, done: int) -> bool:
        """Whether a validation follows the step that makes `done` steps; the untrained model is looked at too."""
        return done in (0, self.steps) or _due(done, self.eval_interval)

    def saves(self, done: int) -> bool:
        """Whether a checkpoint follows the step that makes `done` steps."""
        return done == self.steps or _due(done, self.checkpoint_interval)


@dataclass(frozen=True)
class Validation:
    """A fixed set of validation samples.

    Attributes:
        micro_batches: gives this rank's share anew each time; as many batches on every rank.
        target_bytes: bytes of text behind all targets of the whole set, for bits per byte.
    """

    micro_batches: Callable[[], Iterable[Batch]]
    target_bytes: int

    def bits_per_byte(self, result: EvalResult) -> float | None:
        """Cross entropy in bits per byte of text, comparable across tokenizers; None where bytes are unknown."""
        return result.loss_sum / math.log(2) / self.target_bytes if self.target_bytes else None


def fit(
    engine: TrainEngine,
    steps: Iterable[tuple[int, Sequence[Batch]]],
    plan: FitPlan,
    *,
    validation: Validation | None,
    save: Callable[[TrainEngine], Path],
    monitor: Monitor,
) -> None:
    """Train from `engine.step` to the end of the plan.

    Args:
        engine: fresh or resumed.
        steps: step number (from 0) and this rank's micro-batches, from `engine.step` on.
        plan: when to validate and save.
        validation: none: no validation.
        save: writes a whole checkpoint of the engine and says where; collective.
        monitor: told of every event, on every rank.

    Raises:
        UserError: the loss stopped being a number; nothing is saved from then on.
    """
    monitor.start(engine.step, plan.steps)
    if engine.step == 0:
        _evaluate(engine, 0, plan, validation, monitor)
    for step, micro_batches in steps:
        monitor.step(engine.train_step(micro_batches), step + 1)
        _require_finite(monitor, step + 1)
        _evaluate(engine, step + 1, plan, validation, monitor)
        _save(engine, step + 1, plan, save, monitor)


def _evaluate(engine: TrainEngine, done: int, plan: FitPlan, validation: Validation | None, monitor: Monitor) -> None:
    if validation is None or not plan.evaluates(done):
        return
    with monitor.pause():
        result = engine.evaluate(validation.micro_batches())
    monitor.evaluation(done, result.loss, validation.bits_per_byte(result))


def _save(engine: TrainEngine, done: int, plan: FitPlan, save: Callable[[TrainEngine], Path], monitor: Monitor) -> None:
    if not plan.saves(done):
        return
    with monitor.pause():
        _require_finite(monitor, done)
        started = time.monotonic()
        folder = save(engine)
    monitor.checkpoint(done, folder, time.monotonic() - started)


def _require_finite(monitor: Monitor, done: int) -> None:
    """Stop a run that computes nothing any more; every rank reads the same losses at the same steps, so all do."""
    if monitor.first_non_finite is not None:
        raise UserError(
            f"the loss or its gradient is not finite since step {monitor.first_non_finite}, so step {done} is not "
            "saved; resume from the last checkpoint with a lower optimizer.learning_rate or another run.seed"
        )


def _due(done: int, interval: int) -> bool:
    return interval > 0 and done % interval == 0
