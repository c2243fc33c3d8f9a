"""What rank 0 shows: one live line on a terminal, plain lines in a pipe or a batch job's output."""

import sys
from datetime import timedelta
from typing import Protocol, TextIO

from rich.console import Console as RichConsole
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Column

from fmengine.monitor.metrics import StepRecord


class Console(Protocol):
    """Where a run's lines go."""

    def start(self, step: int, steps: int) -> None:
        """The run goes on from `step`."""
        ...

    def advance(self, step: int) -> None:
        """A step was taken; nothing is known of it yet."""
        ...

    def record(self, record: StepRecord, seconds_left: float | None) -> None:
        """A step was read."""
        ...

    def message(self, text: str) -> None:
        """A line that stays: a validation, a checkpoint."""
        ...

    def close(self) -> None:
        """Nothing follows."""
        ...


class PlainConsole:
    """A line for every record.

    Args:
        stream: where to.
        kind: what a rank is ("GPU", "process").
        world_size: figures per rank are left out where there is one.
    """

    def __init__(self, stream: TextIO, kind: str, world_size: int) -> None:
        self._stream, self._kind, self._world_size = stream, kind, world_size
        self._steps = 0

    def start(self, step: int, steps: int) -> None:  # noqa: ARG002
        """Take note of the number of steps."""
        self._steps = steps

    def advance(self, step: int) -> None:
        """Nothing to show."""

    def record(self, record: StepRecord, seconds_left: float | None) -> None:
        """Print a line."""
        self.message(line(record, self._steps, self._kind, self._world_size, seconds_left))

    def message(self, text: str) -> None:
        """Print a line."""
        print(text, file=self._stream, flush=True)

    def close(self) -> None:
        """Nothing to do: the stream is not ours."""


class LiveConsole:
    """A progress bar with the newest figures on one line; messages scroll by above it."""

    def __init__(self, stream: TextIO) -> None:
        # Standard output is the log file's while a run logs; standard error may share the terminal with the bar.
        self._progress = Progress(
            BarColumn(bar_width=10),
            MofNCompleteColumn(),
            TextColumn("{task.description}", table_column=Column(no_wrap=True, overflow="ellipsis")),
            console=RichConsole(file=stream, force_terminal=True, highlight=False),
            refresh_per_second=4,
            redirect_stdout=False,
            redirect_stderr=sys.stderr.isatty(),
        )
        self._task = self._progress.add_task("the first step is the slowest")

    def start(self, step: int, steps: int) -> None:
        """Show the bar."""
        self._progress.update(self._task, completed=step, total=steps)
        self._progress.start()

    def advance(self, step: int) -> None:
        """Move the bar."""
        self._progress.update(self._task, completed=step)

    def record(self, record: StepRecord, seconds_left: float | None) -> None:
        """Show the figures beside the bar."""
        self._progress.update(self._task, completed=record.step, description=short_line(record, seconds_left))

    def message(self, text: str) -> None:
        """Print a line above the bar."""
        self._progress.console.print(text, markup=False)

    def close(self) -> None:
        """Leave the bar as it stands."""
        self._progress.stop()


def line(record: StepRecord, steps: int, kind: str, world_size: int, seconds_left: float | None) -> str:
    """A record as one line of text.

    Args:
        record: a step.
        steps: of the whole run.
        kind: what a rank is ("GPU", "process").
        world_size: how many ranks; with one, tokens/s are said once.
        seconds_left: till the last step, None where not known.
    """
    figures = [
        f"step {record.step:>{len(str(steps))}}/{steps}",
        f"loss {record.loss:.4f}",
        f"lr {record.learning_rate:.2e}",
        f"grad norm {record.grad_norm:.3f}" + (" (step skipped)" if record.skipped else ""),
    ]
    if rates := record.rates:
        figures.append(f"{count(rates.tokens_per_second)} tokens/s")
        if world_size > 1:
            figures.append(f"{count(rates.tokens_per_second_per_device)} tokens/s/{kind}")
        figures.append(f"{_three_digits(rates.tflops_per_device)} TFLOP/s/{kind}")
        if rates.mfu is not None:
            figures.append(f"MFU {rates.mfu:.1%}")
    figures.append(f"memory {record.peak_memory / 2**30:.2f} GiB")
    if seconds_left is not None:
        figures.append(f"left {timedelta(seconds=round(seconds_left))}")
    return "  ".join(figures)


def short_line(record: StepRecord, seconds_left: float | None) -> str:
    """The figures that fit beside a bar in 80 columns."""
    figures = [f"loss {record.loss:.4f}", f"lr {record.learning_rate:.1e}", f"norm {record.grad_norm:.2f}"]
    if record.rates:
        figures.append(f"{count(record.rates.tokens_per_second)} tok/s")
    if seconds_left is not None:
        figures.append(f"left {timedelta(seconds=round(seconds_left))}")
    return " ".join(figures)


def count(value: float) -> str:
    """Three digits and a unit: 842, 12.3k, 1.25M."""
    for unit, scale in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= scale:
            return f"{_three_digits(value / scale)}{unit}"
    return _three_digits(value)


def _three_digits(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"
