"""`fmengine prepare IN... --tokenizer DIR_OR_FILE --out PREFIX`: text files to token data."""

import argparse
import os
import shlex
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from fmengine.errors import UserError

if TYPE_CHECKING:  # imported in `run`, so that --help stays fast
    from fmengine.data.prepare import Progress

BAD_ROWS_SHOWN = 20
SECONDS_BETWEEN_LINES = 10.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument(
        "inputs",
        nargs="+",
        type=Path,
        metavar="IN",
        help=".jsonl, .jsonl.gz, .jsonl.zst (a document a row) or .txt (a document a file)",
    )
    parser.add_argument(
        "--tokenizer", type=Path, required=True, metavar="DIR_OR_FILE", help="folder with tokenizer.json, or the file"
    )
    parser.add_argument("--out", type=Path, required=True, metavar="PREFIX", help="makes PREFIX.bin, .idx and .json")
    parser.add_argument(
        "--workers", type=int, metavar="N", help="processes that tokenize; by default one a usable core"
    )
    parser.add_argument("--text-key", default="text", metavar="KEY", help="key of the text in a row (%(default)s)")
    parser.add_argument(
        "--on-error",
        choices=("stop", "skip"),
        default="stop",
        help="a bad row ends the run and leaves nothing, or is left out and counted (%(default)s)",
    )
    parser.add_argument(
        "--eod",
        metavar="TOKEN",
        help="end-of-document token; by default the tokenizer's eos_token, else <|endoftext|>, </s> or the like",
    )
    parser.add_argument("--force", action="store_true", help="replace an existing output")


def run(args: argparse.Namespace, environ: Mapping[str, str]) -> int:  # noqa: ARG001  the commands' interface
    """Run the command; progress goes to stderr, the result's one line to stdout.

    Raises:
        UserError: as `data.prepare.prepare`, and for a number of workers below 1.
    """
    from fmengine.data.prepare import prepare

    workers = args.workers if args.workers is not None else _usable_cores()
    if workers < 1:
        raise UserError(f"--workers: {workers} is not a number of processes; give 1 or more")
    show = _Bar() if sys.stderr.isatty() else _Lines(lambda line: print(line, file=sys.stderr, flush=True))
    rows = _BadRows(show.print)
    with show:
        manifest = prepare(
            args.inputs,
            args.tokenizer,
            args.out,
            workers=workers,
            text_key=args.text_key,
            on_error=args.on_error,
            eod=args.eod,
            force=args.force,
            command=shlex.join(["fmengine", *sys.argv[1:]]),
            on_progress=show.update,
            on_bad_row=rows.add,
        )
    print(
        f"{args.out}: {manifest.documents} documents, {manifest.tokens} tokens, {manifest.text_bytes} bytes of text; "
        f"{manifest.skipped_rows} bad and {manifest.empty_rows} empty rows left out"
    )
    return 0


def _usable_cores() -> int:
    """Cores that this process may use: under a batch system fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class _BadRows:
    """Prints the first rows that were left out; the rest is only counted."""

    def __init__(self, show: Callable[[str], None]) -> None:
        self._show = show
        self._count = 0

    def add(self, row: str) -> None:
        self._count += 1
        if self._count <= BAD_ROWS_SHOWN:
            self._show(f"left out: {row}")
        elif self._count == BAD_ROWS_SHOWN + 1:
            self._show("left out: more rows, which are only counted")


class _Lines:
    """Progress for a log: one line each ten seconds."""

    def __init__(self, write: Callable[[str], None]) -> None:
        self.print = write
        self._start = self._last = time.monotonic()

    def __enter__(self) -> "_Lines":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def update(self, progress: "Progress") -> None:
        now = time.monotonic()
        if now - self._last >= SECONDS_BETWEEN_LINES:
            self._last = now
            share = progress.read_bytes / max(progress.total_bytes, 1)
            speed = progress.tokens / (now - self._start)
            self.print(
                f"prepare: {share:.0%} | {progress.documents} documents | {progress.tokens} tokens | {speed:.0f}/s"
            )


class _Bar:
    """Progress for a terminal."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar

        self._bar = Bar(
            TextColumn("prepare"),
            BarColumn(),
            DownloadColumn(),
            TextColumn("{task.fields[tokens]} tokens"),
            TimeRemainingColumn(),
            console=Console(stderr=True),
        )
        self._task = self._bar.add_task("prepare", tokens=0)

    def print(self, line: str) -> None:
        self._bar.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def __enter__(self) -> "_Bar":
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def update(self, progress: "Progress") -> None:
        self._bar.update(self._task, completed=progress.read_bytes, total=progress.total_bytes, tokens=progress.tokens)
