"""Child processes that live and die together: signals go to all, the first failure ends the rest."""

import contextlib
import ctypes
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType

FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
"""What the parent hands on; the children decide what it means."""

GRACE = 30.0
"""Seconds between SIGTERM and SIGKILL for the ranks that are left when one has failed."""

PR_SET_PDEATHSIG = 1
"""From <linux/prctl.h>."""


def run_children(command: Sequence[str], environs: Sequence[Mapping[str, str]], *, grace: float = GRACE) -> int:
    """Run `command` once with each environment and wait for all.

    Child 0 has this process's stdout and stderr, the others its stderr alone, and none a stdin.

    Args:
        command: the program and its arguments.
        environs: the environment of each child.
        grace: seconds that the others get to end after one has failed.

    Returns:
        0, or the exit code of the child that failed first; 128 + N where signal N killed it.
    """
    children: list[subprocess.Popen[bytes]] = []
    with _forwarding(children, len(environs)) as catch_up:
        try:
            for rank, environ in enumerate(environs):
                children.append(_start(command, environ, silent=rank > 0))
            catch_up()
            return _wait(children, grace)
        finally:
            for child in children:
                _kill(child)


def _start(command: Sequence[str], environ: Mapping[str, str], *, silent: bool) -> subprocess.Popen[bytes]:
    parent = os.getpid()
    library = ctypes.CDLL(None) if sys.platform == "linux" else None

    def die_with_parent() -> None:
        if library is not None:
            library.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != parent:  # it died before prctl
                os._exit(1)

    return subprocess.Popen(
        command,
        env=dict(environ),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL if silent else None,
        # A group of its own, so that Ctrl-C arrives once, through us, and not from the terminal as well.
        process_group=0,
        preexec_fn=die_with_parent,  # safe: this process has no other threads yet
    )


def _wait(children: Sequence[subprocess.Popen[bytes]], grace: float) -> int:
    """Wait for all; once one fails, end the others."""
    ended: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()

    def watch(rank: int, child: subprocess.Popen[bytes]) -> None:
        ended.put((rank, child.wait()))

    for rank, child in enumerate(children):
        threading.Thread(target=watch, args=(rank, child), daemon=True).start()
    code, deadline = 0, None
    for left in range(len(children) - 1, -1, -1):
        timeout = None if deadline is None else max(0.0, deadline - time.monotonic())
        try:
            rank, status = ended.get(timeout=timeout)
        except queue.Empty:
            return code
        if status and not code:
            code = status if status > 0 else 128 - status
            if left:
                print(f"fmengine: rank {rank} ended with exit code {code}; ending the others", file=sys.stderr)
            deadline = time.monotonic() + grace
            for child in children:
                _send(child, signal.SIGTERM)
    return code


@contextlib.contextmanager
def _forwarding(children: Sequence[subprocess.Popen[bytes]], count: int) -> Iterator[Callable[[], None]]:
    """Hand signals on to the children while the block runs.

    Gives a function to call once all `count` are started: it sends what came before that.
    """
    early: list[int] = []

    def forward(number: int, _: FrameType | None) -> None:
        if len(children) < count:
            early.append(number)
            return
        for child in children:
            _send(child, number)

    def catch_up() -> None:
        while early:
            forward(early.pop(0), None)

    before = {number: signal.signal(number, forward) for number in FORWARDED}
    try:
        yield catch_up
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _send(child: subprocess.Popen[bytes], number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        child.send_signal(number)


def _kill(child: subprocess.Popen[bytes]) -> None:
    """End a child that still runs, and the processes that it started."""
    if child.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
