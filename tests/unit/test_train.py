"""The loop over a pretend engine, with the real monitor: what happens after which step."""

import io
import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from fmengine.batch import Batch
from fmengine.engine.protocol import EvalResult, StepResult
from fmengine.errors import UserError
from fmengine.monitor import Device, Monitor
from fmengine.train import FitPlan, Validation, fit

Event = tuple[Any, ...]
TOKEN = torch.zeros(1, 1, dtype=torch.int64)
BATCH = Batch(TOKEN, TOKEN, TOKEN, torch.tensor([0, 1], dtype=torch.int32))


class Engine:
    """Counts steps; its loss is 10 less the step, or what `losses` says of a step (1 is the first)."""

    def __init__(self, events: list[Event], step: int = 0, losses: dict[int, float] | None = None) -> None:
        self.events, self.step, self.losses = events, step, losses or {}
        self.skipped = False

    def train_step(self, micro_batches: Sequence[Batch]) -> StepResult:
        self.step += 1
        self.events.append(("step", self.step, len(micro_batches)))
        loss = self.losses.get(self.step, 10.0 - self.step)
        return StepResult(torch.tensor(loss), 1.0, 0.1, torch.tensor(4), skipped=self.skipped)

    def evaluate(self, micro_batches: Iterable[Batch]) -> EvalResult:
        self.events.append(("eval", self.step, len(list(micro_batches))))
        return EvalResult(loss_sum=6.0 * math.log(2), target_tokens=3)

    def save(self, folder: Path) -> None:
        raise AssertionError("the loop saves through its argument")

    load = save


class Lab:
    """One run of the loop: what it did, in order, and what the monitor made of it."""

    def __init__(self, folder: Path, rank: int = 0) -> None:
        self.folder, self.events, self.stream = folder, list[Event](), io.StringIO()
        self.monitor = Monitor(
            folder,
            rank=rank,
            world_size=1,
            device=Device("CPU", "process", None, lambda: 0),
            flops_per_token=1.0,
            samples_per_step=1,
            tokens_per_sample=1,
            log_interval=1000,
            stream=self.stream,
            terminal=False,
        )

    def fit(self, plan: FitPlan, engine: Engine, *, validation: bool = True, target_bytes: int = 2) -> list[Event]:
        def save(saved: Any) -> Path:
            assert saved is engine
            self.events.append(("save", engine.step))
            return self.folder / f"step-{engine.step}"

        steps = ((step, [BATCH] * (step % 2 + 1)) for step in range(engine.step, plan.steps))
        samples = Validation(lambda: iter([BATCH] * 3), target_bytes) if validation else None
        try:
            fit(engine, steps, plan, validation=samples, save=save, monitor=self.monitor)
        finally:
            self.monitor.finish()
        return self.events

    def rows(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]


def kinds(events: Sequence[Event]) -> list[tuple[str, int]]:
    return [(kind, step) for kind, step, *_ in events]


def test_the_whole_run_in_order(tmp_path: Path) -> None:
    lab = Lab(tmp_path)
    events = lab.fit(FitPlan(steps=5, eval_interval=2, checkpoint_interval=3), Engine(lab.events))
    assert events == [
        ("eval", 0, 3),
        ("step", 1, 1),
        ("step", 2, 2),
        ("eval", 2, 3),
        ("step", 3, 1),
        ("save", 3),
        ("step", 4, 2),
        ("eval", 4, 3),
        ("step", 5, 1),
        ("eval", 5, 3),
        ("save", 5),
    ]


def test_what_the_monitor_is_told_is_what_happened(tmp_path: Path) -> None:
    lab = Lab(tmp_path)
    lab.fit(FitPlan(steps=5, eval_interval=2, checkpoint_interval=3), Engine(lab.events))
    rows = lab.rows()
    told = {"train": "step", "eval": "eval", "checkpoint": "save"}
    assert [(told[row["kind"]], row["step"]) for row in rows if row["kind"] != "start"] == kinds(lab.events)
    assert [row["loss"] for row in rows if row["kind"] == "train"] == [9.0, 8.0, 7.0, 6.0, 5.0]
    assert {(row["loss"], row["bits_per_byte"]) for row in rows if row["kind"] == "eval"} == {(2 * math.log(2), 3.0)}
    assert [row["folder"] for row in rows if row["kind"] == "checkpoint"] == [
        str(tmp_path / f"step-{step}") for step in (3, 5)
    ]
    assert "checkpoint at step 5" in lab.stream.getvalue()


def test_intervals_of_0_mean_the_ends_alone(tmp_path: Path) -> None:
    lab = Lab(tmp_path)
    events = kinds(lab.fit(FitPlan(4, 0, 0), Engine(lab.events)))
    assert [event for event in events if event[0] != "step"] == [("eval", 0), ("eval", 4), ("save", 4)]


def test_an_interval_that_ends_with_the_run_happens_once(tmp_path: Path) -> None:
    lab = Lab(tmp_path)
    events = kinds(lab.fit(FitPlan(4, 2, 2), Engine(lab.events)))
    assert events.count(("eval", 4)) == events.count(("save", 4)) == 1


def test_no_validation(tmp_path: Path) -> None:
    lab = Lab(tmp_path)
    events = kinds(lab.fit(FitPlan(2, 1, 1), Engine(lab.events), validation=False))
    assert events == [("step", 1), ("save", 1), ("step", 2), ("save", 2)]


def test_bits_per_byte_are_left_out_where_bytes_are_not_known(tmp_path: Path) -> None:
    lab = Lab(tmp_path)
    lab.fit(FitPlan(1, 0, 0), Engine(lab.events), target_bytes=0)
    assert [row["bits_per_byte"] for row in lab.rows() if row["kind"] == "eval"] == [None, None]


def test_a_resumed_run_goes_on_and_does_not_look_at_its_start_again(tmp_path: Path) -> None:
    lab = Lab(tmp_path)
    events = kinds(lab.fit(FitPlan(7, 2, 3), Engine(lab.events, step=4)))
    assert events == [("step", 5), ("step", 6), ("eval", 6), ("save", 6), ("step", 7), ("eval", 7), ("save", 7)]
    assert "going on from step 4" in lab.stream.getvalue()
    assert [row["step"] for row in lab.rows() if row["kind"] == "train"] == [5, 6, 7]


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_loss_that_is_no_number_stops_every_rank_before_the_next_save(tmp_path: Path, rank: int, loss: float) -> None:
    lab = Lab(tmp_path, rank)
    engine = Engine(lab.events, losses={3: loss})
    with pytest.raises(UserError) as error:
        lab.fit(FitPlan(9, 0, 2), engine)
    assert "not finite since step 3, so step 4 is not saved" in str(error.value)
    assert "optimizer.learning_rate" in str(error.value)
    assert [event for event in kinds(lab.events) if event[0] == "save"] == [("save", 2)]
    assert engine.step == 4


def test_at_the_end_too(tmp_path: Path) -> None:
    lab = Lab(tmp_path)
    with pytest.raises(UserError, match="since step 3, so step 3 is not saved"):
        lab.fit(FitPlan(3, 0, 0), Engine(lab.events, losses={3: math.nan}))
    assert ("save", 3) not in lab.events


def test_a_step_that_was_thrown_away_is_no_reason_to_stop(tmp_path: Path) -> None:
    lab = Lab(tmp_path)
    engine = Engine(lab.events, losses={1: math.inf})
    engine.skipped = True
    lab.fit(FitPlan(2, 0, 0), engine)
    assert ("save", 2) in lab.events
