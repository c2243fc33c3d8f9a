"""Real processes, each a bare Python that starts in a few hundredths of a second."""

import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fmengine.launch.children import _forwarding, run_children

LIMIT = 60
"""Seconds after which a test gives up; none waits that long unless it fails."""

PYTHON = (sys.executable, "-S", "-E")


class Line:
    """A named pipe to which children write words; it ends when the last of them has."""

    def __init__(self, path: Path) -> None:
        os.mkfifo(path)
        self.path = path
        self._descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        self._seen = b""

    def _read(self) -> bytes:
        ready, _, _ = select.select([self._descriptor], [], [], LIMIT)
        assert ready, f"nothing came after {self._seen!r}"
        return os.read(self._descriptor, 1000)

    def words(self, count: int) -> set[str]:
        """Wait for `count` words in all; gives those that came."""
        while len(self._seen.split()) < count:
            chunk = self._read()
            assert chunk, f"all children ended after {self._seen!r}"
            self._seen += chunk
        return set(self._seen.decode().split())

    def rest(self) -> set[str]:
        """Wait until every child has ended; gives all words."""
        while chunk := self._read():
            self._seen += chunk
        return set(self._seen.decode().split())

    def close(self) -> None:
        os.close(self._descriptor)


@pytest.fixture
def line(tmp_path: Path) -> Iterator[Line]:
    made = Line(tmp_path / "line")
    yield made
    made.close()


def run(code: str, count: int, line: Line | None = None, grace: float = LIMIT) -> int:
    """Run `code` in children; in it `rank` is a number and `say(word)` writes to the line."""
    command = [*PYTHON, "-c", PRELUDE + code]
    path = str(line.path) if line else "/dev/null"
    return run_children(command, [{"RANK": str(rank), "LINE": path} for rank in range(count)], grace=grace)


PRELUDE = """
import os, signal, sys
rank = int(os.environ["RANK"])
line = os.open(os.environ["LINE"], os.O_WRONLY)
def say(word): os.write(line, f"{word}\\n".encode())  # a handler may call it in the middle of itself
"""


def test_all_well() -> None:
    assert run("sys.exit(0)", 3) == 0


def test_the_first_failure_gives_the_exit_code_and_ends_the_others(
    line: Line, capfd: pytest.CaptureFixture[str]
) -> None:
    code = """
def term(*_):
    say(f"term{rank}")
    sys.exit(5)
signal.signal(signal.SIGTERM, term)
say(f"ready{rank}")
if rank == 1:
    sys.exit(3)
while True: signal.pause()
"""
    # The others may be told to end before they listen, so only what they do then is not asked.
    assert run(code, 3, line) == 3
    assert "ready1" in line.rest()
    assert "rank 1 ended with exit code 3; ending the others" in capfd.readouterr().err


def test_a_child_killed_by_a_signal_gives_128_and_its_number() -> None:
    assert run("if rank == 0: os.kill(os.getpid(), signal.SIGKILL)\nsignal.pause()", 2) == 128 + signal.SIGKILL


def test_a_child_that_ignores_the_end_is_killed_after_the_grace(line: Line) -> None:
    code = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
say(f"ready{rank}")
if rank == 0:
    # wait until the other one ignores the signal
    os.read(os.open(os.environ["LINE"] + ".go", os.O_RDONLY), 1)
    sys.exit(4)
open(os.environ["LINE"] + ".go", "w").write("x")
while True: signal.pause()
"""
    os.mkfifo(f"{line.path}.go")
    assert run(code, 2, line, grace=0.05) == 4
    assert line.rest() == {"ready0", "ready1"}  # and it ended, or this would wait


def test_rank_0_alone_has_the_output_and_all_have_the_errors(capfd: pytest.CaptureFixture[str]) -> None:
    code = "print(f'out{rank}'); print(f'err{rank}', file=sys.stderr); sys.exit(len(sys.stdin.read()))"
    assert run(code, 2) == 0
    out, err = capfd.readouterr()
    assert out == "out0\n"
    assert {"err0", "err1"} <= set(err.split())  # tokenizers before 0.23 warns there of a fork


def test_handlers_are_put_back() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)]
    run("pass", 1)
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)] == before


PARENT = """
import sys
from fmengine.launch.children import _forwarding, run_children
code, path, count = sys.argv[1:]
environs = [{"RANK": str(rank), "LINE": path} for rank in range(int(count))]
sys.exit(run_children([sys.executable, "-S", "-E", "-c", code], environs))
"""

Starter = Callable[..., "subprocess.Popen[bytes]"]


@pytest.fixture
def parent(line: Line) -> Iterator[Starter]:
    """Start a parent of children that run some code, in a session of its own."""
    started: list[subprocess.Popen[bytes]] = []

    def start(code: str, count: int) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", PARENT, PRELUDE + code, str(line.path), str(count)]
        started.append(subprocess.Popen(command, start_new_session=True))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


LISTEN = """
def heard(number, _):
    say(f"{signal.Signals(number).name}{rank}")
    if number != signal.SIGUSR1:
        sys.exit(0 if number == signal.SIGTERM else 9)
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1): signal.signal(number, heard)
say(f"ready{rank}")
while True: signal.pause()
"""


def test_signals_go_to_every_child_and_a_clean_end_is_a_clean_end(line: Line, parent: Starter) -> None:
    process = parent(LISTEN, 2)
    line.words(2)
    process.send_signal(signal.SIGUSR1)
    assert line.words(4) == {"ready0", "ready1", "SIGUSR10", "SIGUSR11"}
    process.send_signal(signal.SIGTERM)
    assert process.wait(LIMIT) == 0
    assert {"SIGTERM0", "SIGTERM1"} <= line.rest()


def test_an_interrupt_of_the_whole_terminal_arrives_once(line: Line, parent: Starter) -> None:
    process = parent(LISTEN.replace("sys.exit(0 if number == signal.SIGTERM else 9)", "pass"), 2)
    line.words(2)
    os.killpg(process.pid, signal.SIGINT)  # as Ctrl-C does: everyone in the terminal's group
    line.words(4)
    process.send_signal(signal.SIGUSR1)
    assert line.words(6) == {"ready0", "ready1", "SIGINT0", "SIGINT1", "SIGUSR10", "SIGUSR11"}
    assert len(line._seen.split()) == 6


@pytest.mark.skipif(sys.platform != "linux", reason="prctl is Linux's")
def test_no_child_outlives_a_killed_parent(line: Line, parent: Starter) -> None:
    process = parent(LISTEN, 2)
    line.words(2)
    process.kill()
    process.wait(LIMIT)
    assert line.rest() == {"ready0", "ready1"}  # they end, and are not asked


class Recorder:
    """Stands in for a child process."""

    def __init__(self) -> None:
        self.received: list[int] = []

    def send_signal(self, number: int) -> None:
        self.received.append(number)


def test_a_signal_that_comes_while_children_are_started_reaches_all() -> None:
    children: list[Any] = [Recorder()]
    with _forwarding(children, 2) as catch_up:
        signal.raise_signal(signal.SIGUSR1)
        assert children[0].received == []
        children.append(Recorder())
        catch_up()
        signal.raise_signal(signal.SIGTERM)
    assert [child.received for child in children] == [[signal.SIGUSR1, signal.SIGTERM]] * 2
