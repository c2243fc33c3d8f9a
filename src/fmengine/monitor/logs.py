"""One log file a rank, RUN/logs/rank-0000.log; the terminal is kept for the run's own lines.

Everything that is written to standard output while a run logs, by DeepSpeed, torch or C++ code, lands in the file
of its rank: the file descriptor itself is turned there. Standard error stays, for warnings and tracebacks.
"""

import logging
import os
import platform
import shlex
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from io import BufferedWriter, FileIO, TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from fmengine.errors import UserError

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

_PACKAGES = ("fmengine", "torch", "deepspeed", "transformers", "numpy")

_log = logging.getLogger(__name__)


def log_file(run_dir: Path, rank: int) -> Path:
    """Where a rank logs."""
    return run_dir / "logs" / f"rank-{rank:04d}.log"


@contextmanager
def logging_to(run_dir: Path, *, rank: int, world_size: int, header: Sequence[str] = ()) -> Iterator[TextIO]:
    """Send this process's log to its rank's file; give back the standard output it had, for the run's own lines.

    On standard error: fmengine's warnings, and the errors of every library. In the file: those, everything from INFO
    on, Python's warnings, standard output, and the traceback of an exception that leaves the block.

    Args:
        run_dir: the run folder; logs/ is made in it. An older log of the same rank is appended to.
        rank: this process's rank.
        world_size: how many there are; above one, lines on standard error name the rank.
        header: lines written first (see `header`).

    Raises:
        UserError: where the file cannot be written.
    """
    path = log_file(run_dir, rank)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        to_file = _LossyFileHandler(path, encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise UserError(
            f"run.dir: cannot write the log {path} ({error.strerror}); choose a folder that you may write to"
        ) from None
    to_file.setFormatter(_Formatter(f"%(asctime)s %(levelname)s rank {rank} %(name)s: %(message)s"))
    to_stderr = _StderrHandler()
    to_stderr.addFilter(lambda record: record.levelno >= (logging.WARNING if _is_ours(record) else logging.ERROR))
    to_stderr.setFormatter(logging.Formatter(f"{f'rank {rank}: ' if world_size > 1 else ''}%(levelname)s %(message)s"))

    with _root_logger((to_file, to_stderr)), _no_other_handlers(), _stdout_in(path) as stream:
        for line in header:
            _log.info("%s", line)
        try:
            yield stream
        except Exception:
            # The interpreter prints it on standard error; the file must have it too, and only once each.
            logging.getLogger().removeHandler(to_stderr)
            _log.exception("the run ends with this error")
            raise


def header(command: Sequence[str], config: Path | None) -> list[str]:
    """What one wants to know of a log a year later: versions, host, config and command."""
    versions = " ".join(f"{name} {_version(name)}" for name in _PACKAGES)
    return [
        f"{versions} python {platform.python_version()}",
        f"host {socket.gethostname()} ({platform.platform()}) process {os.getpid()}",
        f"config {config.absolute() if config else '(built-in default)'}",
        f"command {shlex.join(command)}",
    ]


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "(not installed)"


def _is_ours(record: logging.LogRecord) -> bool:
    return record.name.partition(".")[0] == "fmengine"


class _Formatter(logging.Formatter):
    """ISO 8601 in UTC, so that the files of several hosts sort together."""

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:  # noqa: ARG002, N802
        return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")


class _StderrHandler(logging.StreamHandler[TextIO]):
    """Asks for sys.stderr at every line: the live console replaces it so as not to be overwritten."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


class _LossyFileHandler(logging.FileHandler):
    """On a full disk lines are lost, and not the run; nor does the error hide the one that the run ends with."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802  logging's name
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)

    def close(self) -> None:
        with suppress(OSError):
            super().close()


class _LossyFile(FileIO):
    """As the handler: what a full disk does not take is lost. A reader that has gone still is an error."""

    def write(self, data: "ReadableBuffer") -> int:
        try:
            return super().write(data) or 0
        except BrokenPipeError:
            raise
        except OSError:
            return len(memoryview(data).cast("B"))


@contextmanager
def _root_logger(handlers: Sequence[logging.Handler]) -> Iterator[None]:
    root = logging.getLogger()
    level = root.level
    root.setLevel(logging.INFO)
    for handler in handlers:
        root.addHandler(handler)
    logging.captureWarnings(True)
    try:
        yield
    finally:
        logging.captureWarnings(False)
        root.setLevel(level)
        for handler in handlers:
            root.removeHandler(handler)
            handler.close()


@contextmanager
def _no_other_handlers() -> Iterator[None]:
    """Let libraries that have handlers of their own (torch writes to standard error) log through the root alone."""
    loggers = [entry for entry in logging.root.manager.loggerDict.values() if isinstance(entry, logging.Logger)]
    before = [(logger, list(logger.handlers), logger.propagate) for logger in loggers if logger.handlers]
    for logger, _, _ in before:
        logger.handlers, logger.propagate = [], True
    try:
        yield
    finally:
        for logger, handlers, propagate in before:
            logger.handlers, logger.propagate = handlers, propagate


@contextmanager
def _stdout_in(path: Path) -> Iterator[TextIO]:
    """Append what goes to file descriptor 1 to a file, and give back what it was."""
    sys.stdout.flush()
    given = BufferedWriter(_LossyFile(os.dup(1), "w"))
    with TextIOWrapper(given, line_buffering=True, encoding="utf-8", errors="replace") as stream:
        with path.open("ab") as file:
            os.dup2(file.fileno(), 1)
        if isinstance(sys.stdout, TextIOWrapper):
            sys.stdout.reconfigure(line_buffering=True)
        try:
            yield stream
        finally:
            with suppress(OSError):
                sys.stdout.flush()
            os.dup2(stream.fileno(), 1)
