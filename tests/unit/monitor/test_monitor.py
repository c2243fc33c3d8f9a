"""The monitor: what it reads and when, the rates it reports, and what rank 0 prints."""

import io
import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fmengine.engine.protocol import StepResult
from fmengine.monitor import Device, Monitor


class Clock:
    """A clock that the test moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Lab:
    """A monitor over a clock, with the files and lines it makes."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.clock, self.stream, self.folder = Clock(), io.StringIO(), folder
        settings: dict[str, Any] = {
            "rank": 0,
            "world_size": 2,
            "device": Device("NVIDIA H200", "GPU", 1e9, lambda: 3 * 2**30),
            "flops_per_token": 1e6,
            "samples_per_step": 4,
            "tokens_per_sample": 250,
            "log_interval": 5,
            "terminal": False,
        }
        self.monitor = Monitor(folder, stream=self.stream, clock=self.clock, **{**settings, **options})

    def run(
        self, first: int, last: int, seconds: float = 1.0, result: Callable[[int], StepResult] | None = None
    ) -> None:
        for step in range(first, last + 1):
            self.clock.now += seconds
            self.monitor.step((result or plain)(step), step)

    def rows(self, kind: str = "train") -> list[dict[str, Any]]:
        lines = (self.folder / "metrics.jsonl").read_text().splitlines()
        return [row for row in map(json.loads, lines) if row["kind"] == kind]

    @property
    def lines(self) -> list[str]:
        return self.stream.getvalue().splitlines()


def plain(step: int) -> StepResult:
    return StepResult(torch.tensor(10.0 - step), torch.tensor(0.5), 1e-3 * step, torch.tensor(900 + step))


def test_every_step_is_a_row_with_its_own_numbers(tmp_path: Path) -> None:
    lab = Lab(tmp_path)
    lab.monitor.start(0, 7)
    lab.run(1, 7)
    lab.monitor.finish()
    rows = lab.rows()
    assert [row["step"] for row in rows] == list(range(1, 8))
    assert [row["loss"] for row in rows] == [10.0 - step for step in range(1, 8)]
    assert [row["target_tokens"] for row in rows] == [900 + step for step in range(1, 8)]
    assert [row["samples"] for row in rows] == [4 * step for step in range(1, 8)]
    assert rows[3]["learning_rate"] == 1e-3 * 4
    assert rows[0]["peak_memory_bytes"] == 3 * 2**30
    assert {"grad_norm", "mfu", "tflops_per_device", "time", "skipped"} <= rows[0].keys()


def test_rates_leave_out_the_first_step_and_pauses(tmp_path: Path) -> None:
    lab = Lab(tmp_path)
    lab.monitor.start(0, 20)
    lab.run(1, 1, seconds=60)
    lab.run(2, 7, seconds=2)
    with lab.monitor.pause():
        lab.clock.now += 1000
    lab.run(8, 20, seconds=2)
    lab.monitor.finish()
    rows = lab.rows()
    assert rows[0]["tokens_per_second"] is None
    assert [row["tokens_per_second"] for row in rows[1:]] == pytest.approx([500] * 19)
    assert rows[5]["tokens_per_second_per_device"] == pytest.approx(250)
    assert rows[5]["tflops_per_device"] == pytest.approx(250e6 / 1e12)
    assert rows[5]["mfu"] == pytest.approx(0.25)


def test_a_pause_writes_what_is_pending_before_the_checkpoint(tmp_path: Path) -> None:
    lab = Lab(tmp_path)
    lab.monitor.start(0, 20)
    lab.run(1, 3)
    assert [row["step"] for row in lab.rows()] == [1]
    with lab.monitor.pause():
        assert [row["step"] for row in lab.rows()] == [1, 2, 3]


def test_the_device_is_read_once_an_interval(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[int] = []
    tolist = Tensor.tolist
    monkeypatch.setattr(Tensor, "tolist", lambda self: reads.append(1) or tolist(self))
    for name in ("item", "__float__", "__int__", "__bool__", "cpu", "numpy"):
        monkeypatch.setattr(Tensor, name, lambda self, name=name: pytest.fail(f"Tensor.{name} synchronises"))
    lab = Lab(tmp_path)
    lab.monitor.start(0, 20)
    lab.run(1, 1)
    after_first = len(reads)
    lab.run(2, 4)
    assert len(reads) == after_first
    lab.run(5, 5)
    assert len(reads) == 2 * after_first


def test_resumed_rows_stand_once(tmp_path: Path) -> None:
    lab = Lab(tmp_path)
    lab.monitor.start(0, 12)
    lab.run(1, 10)
    lab = Lab(tmp_path)
    lab.monitor.start(6, 12)
    lab.run(7, 12)
    lab.monitor.finish()
    assert [row["step"] for row in lab.rows()] == list(range(1, 13))
    assert [row["step"] for row in lab.rows("start")] == [0, 6]
    assert "going on from step 6: 12 steps on 2 x NVIDIA H200" in lab.lines[0]


def test_the_printed_line(tmp_path: Path) -> None:
    lab = Lab(tmp_path)
    lab.monitor.start(0, 100)
    lab.run(1, 5, seconds=2)
    assert lab.lines[0] == "starting: 100 steps on 2 x NVIDIA H200"
    assert lab.lines[1] == "step   1/100  loss 9.0000  lr 1.00e-03  grad norm 0.500  memory 3.00 GiB"
    assert lab.lines[2] == (
        "step   5/100  loss 5.0000  lr 5.00e-03  grad norm 0.500  500 tokens/s  250 tokens/s/GPU  "
        "0.00025 TFLOP/s/GPU  MFU 25.0%  memory 3.00 GiB  left 0:03:10"
    )


def test_evaluations_and_checkpoints_are_rows_and_lines(tmp_path: Path) -> None:
    lab = Lab(tmp_path)
    lab.monitor.start(0, 10)
    lab.monitor.evaluation(5, 4.5, 2.25)
    lab.monitor.evaluation(6, 4.5, None)
    lab.monitor.checkpoint(5, tmp_path / "step-00000005", 1.25)
    lab.monitor.finish()
    assert lab.rows("eval")[0]["bits_per_byte"] == 2.25
    assert lab.rows("checkpoint")[0]["step"] == 5
    assert lab.lines[1] == "validation at step 5: loss 4.5000  2.2500 bits per byte"
    assert lab.lines[2] == "validation at step 6: loss 4.5000"


def test_other_ranks_log_but_write_and_print_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    lab = Lab(tmp_path, rank=1)
    lab.monitor.start(0, 5)
    lab.run(1, 5)
    lab.monitor.finish()
    assert not lab.lines
    assert not (tmp_path / "metrics.jsonl").exists()
    assert "step 5/5  loss 5.0000" in caplog.text


def broken(loss: float, norm: float, skipped: bool = False) -> Callable[[int], StepResult]:
    def result(step: int) -> StepResult:
        good = plain(step)
        if step != 3:
            return good
        return StepResult(torch.tensor(loss), norm, good.learning_rate, good.target_tokens, skipped)

    return result


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(("loss", "norm"), [(float("nan"), 0.5), (1.0, float("inf"))])
def test_what_is_not_finite_is_seen_with_its_step(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, loss: float, norm: float, rank: int
) -> None:
    caplog.set_level(logging.INFO)
    lab = Lab(tmp_path, rank=rank)
    lab.monitor.start(0, 5)
    lab.run(1, 5, result=broken(loss, norm))
    assert lab.monitor.first_non_finite == 3
    (record,) = [record for record in caplog.records if "gradient norm" in record.getMessage()]
    assert record.getMessage().startswith("step 3: loss is ")
    assert record.levelno == (logging.WARNING if rank == 0 else logging.INFO)


def test_a_step_that_the_loss_scaler_threw_away_is_ordinary(tmp_path: Path) -> None:
    lab = Lab(tmp_path)
    lab.monitor.start(0, 5)
    lab.run(1, 5, result=broken(1.0, float("inf"), skipped=True))
    lab.monitor.finish()
    assert lab.monitor.first_non_finite is None
    assert [row["skipped"] for row in lab.rows()] == [False, False, True, False, False]


def test_a_device_that_has_failed_does_not_leave_the_terminal_with_a_bar(tmp_path: Path) -> None:
    """A meta tensor stands in for a GPU after an error: reading it raises."""
    lab = Lab(tmp_path, terminal=True)
    lab.monitor.start(0, 10)
    lab.run(1, 1)
    lab.run(2, 2, result=lambda step: replace(plain(step), loss=torch.empty((), device="meta")))
    assert "\x1b[?25l" in lab.stream.getvalue()  # the cursor is hidden while a bar is shown
    with pytest.raises(NotImplementedError):
        lab.monitor.finish()
    assert lab.stream.getvalue().endswith("\x1b[?25h")


def test_the_live_line_fits_80_columns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    lab = Lab(tmp_path, terminal=True)
    lab.monitor.start(0, 1000)
    lab.run(1, 10)
    lab.monitor.evaluation(10, 4.5, 2.25)
    lab.monitor.finish()
    shown = lab.stream.getvalue()
    assert "validation at step 10: loss 4.5000  2.2500 bits per byte" in shown
    assert "10/1000 loss 0.0000 lr 1.0e-02 norm 0.50 1k tok/s left 0:16:30" in shown
