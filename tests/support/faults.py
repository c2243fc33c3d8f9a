"""Runs that a test kills at a chosen moment, each started in milliseconds: a zygote forks them.

A `Zygote` is one process that has imported torch, DeepSpeed and the engine, and has a single thread; for each
`start` it forks a child that runs `fmengine ARGUMENTS`. The child tells its test through a socket of its own:

    ("save",)                        it enters a save
    ("stopped", phase, operation)    it stands still before a disk operation of a save, as `Stop` asked; kill it
    ("saved", {phase: operations})   it left a save, which made that many disk operations in each phase

and the end of the socket is the end of the child. Nothing sleeps: a test waits on the socket, with a time limit.
"""

import contextlib
import gc
import io
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np

from fmengine.data.tokenizer import save_tokenizer, train_bpe, vocab_size
from support.data import write_documents
from support.distributed import worker_environment
from support.worker import die_with_parent

PHASES = ("prepare", "write", "publish", "delete")
"""Of a save: clearing what is left over; the engine's files written and flushed; manifest to `latest`; old ones."""

LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
CONFIG = """\
run: {dir: run}
model: {family: llama, hidden_size: 32, num_hidden_layers: 2, num_attention_heads: 4}
data: {train: data, tokenizer: tokenizer, sequence_length: 16}
batch: {global_batch_size: 4}
optimizer: {learning_rate: 1e-2}
train: {steps: 4, precision: bf16}
checkpoint: {interval: 2, keep: 2}
"""
VOCAB = 267
"""Of the tokenizer that `write_inputs` makes, and the config's vocabulary."""

MESSAGE = 1 << 16
LIMIT = 60.0
"""Seconds that no event of a tiny run takes, on a busy machine."""


@dataclass(frozen=True)
class Stop:
    """Before which disk operation a child stands still.

    Attributes:
        save: number of the save since the child's start, from 0; a later one where that has too few operations.
        phase: one of `PHASES`.
        operation: number of the operation in that phase, from 0.
    """

    save: int
    phase: str
    operation: int


@dataclass(frozen=True)
class Attempt:
    """What a child is to do.

    Attributes:
        arguments: of `fmengine`.
        folder: current directory of the child; takes its output, in the files `stdout` and `stderr`.
        stop: where it stands still, if anywhere.
    """

    arguments: tuple[str, ...]
    folder: Path
    stop: Stop | None = None


@dataclass(frozen=True)
class Done:
    """How a command ended."""

    code: int
    stdout: str
    stderr: str


class Child:
    """A forked run, as its test sees it."""

    def __init__(self, pid: int, events: socket.socket, reap: Callable[[], int]) -> None:
        self.pid = pid
        self._events = events
        self._reap = reap

    def event(self, timeout: float = LIMIT) -> tuple[Any, ...] | None:
        """The next event; ("ended",) after the last; None where `timeout` seconds bring none."""
        if not select.select([self._events], [], [], timeout)[0]:
            return None
        message = self._events.recv(MESSAGE)
        return pickle.loads(message) if message else ("ended",)

    def go_on(self) -> None:
        """Let a child that stands still go on."""
        self._events.send(b"go on")

    def kill(self) -> int:
        """Kill -9, where it still lives; its exit code, negative for a signal."""
        os.kill(self.pid, signal.SIGKILL)  # it is not reaped before the next line, so this is no other process
        return self.wait()

    def wait(self) -> int:
        """Its exit code, once it has ended by itself."""
        self._events.close()
        return os.waitstatus_to_exitcode(self._reap())


class Zygote:
    """The process that forks; a context manager."""

    def __enter__(self) -> Self:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "support.faults", str(theirs.fileno())],
                env=command_environment(),
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )
        assert self._receive() == "ready"
        return self

    def __exit__(self, *exc: object) -> None:
        self._process.kill()  # its children die with it
        self._process.wait()
        self._socket.close()

    def start(self, attempt: Attempt) -> Child:
        """Fork a child."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            socket.send_fds(self._socket, [pickle.dumps(attempt)], [theirs.fileno()])
            return Child(self._receive(), ours, self._reap)

    def run(self, folder: Path, *arguments: str | Path) -> Done:
        """`fmengine ARGUMENTS` to its end, in a folder."""
        child = self.start(Attempt(tuple(map(str, arguments)), folder))
        while (event := child.event()) != ("ended",):
            assert event is not None, f"fmengine {arguments} hangs"
        code = child.wait()
        return Done(code, (folder / "stdout").read_text(), (folder / "stderr").read_text())

    def _reap(self) -> int:
        self._socket.send(b"reap")
        status: int = self._receive()
        return status

    def _receive(self) -> Any:
        message = self._socket.recv(MESSAGE)
        if not message:
            raise AssertionError(f"the zygote died with exit code {self._process.wait()}")
        return pickle.loads(message)


def main() -> None:
    """Be the zygote, until the socket closes."""
    die_with_parent()
    with socket.socket(fileno=int(sys.argv[1])) as requests:
        import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401  DeepSpeed imports it for any optimizer
        import torch._dynamo  # noqa: F401  torch imports it at the first optimizer
        import transformers  # noqa: F401

        import fmengine.worker  # noqa: F401

        assert len([*Path("/proc/self/task").iterdir()]) == 1, "a thread: it would be missing after the fork"
        gc.freeze()  # DeepSpeed collects garbage many times at its start; that is slow over all that was imported
        requests.send(pickle.dumps("ready"))
        while True:
            message, descriptors, *_ = socket.recv_fds(requests, MESSAGE, 1)
            if not message:
                return
            pid = os.fork()
            if pid == 0:
                requests.close()
                _be_child(pickle.loads(message), socket.socket(fileno=descriptors[0]))
            os.close(descriptors[0])
            requests.send(pickle.dumps(pid))
            if requests.recv(MESSAGE) != b"reap":
                return
            requests.send(pickle.dumps(os.waitpid(pid, 0)[1]))


def _be_child(attempt: Attempt, events: socket.socket) -> None:
    code: Any = 1
    try:
        die_with_parent()
        os.chdir(attempt.folder)
        for descriptor, name in enumerate(("stdout", "stderr"), start=1):
            with Path(name).open("wb") as file:
                os.dup2(file.fileno(), descriptor)
        sys.argv[1:] = attempt.arguments
        code = _run(attempt, events)
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _run(attempt: Attempt, events: socket.socket) -> int:
    from fmengine import cli, worker

    worker.save = Operations(attempt.stop, events).watched(worker.save)
    return cli.main()


class Operations:
    """Counts what the saves of this process do to the disk, and stands still before one of it.

    Every call that changes the disk is one; of a write to a file both halves are, so that torn files come too.
    """

    def __init__(self, stop: Stop | None, events: socket.socket) -> None:
        self._stop, self._events = stop, events
        self._saves = -1
        self._phase: str | None = None
        self._counts: Counter[str] = Counter()
        for name in ("mkdir", "fsync", "rename", "replace", "unlink", "rmdir"):
            setattr(os, name, self._counted(name, getattr(os, name)))
        original = io.open

        def opened(file: Any, mode: str = "r", *args: Any, **keys: Any) -> Any:
            if self._phase is None or not isinstance(file, str | Path) or mode.startswith("r"):
                return original(file, mode, *args, **keys)
            self.happens(f"open {file}")
            return Halved(original(file, mode, *args, **keys), self.happens)

        io.open = opened

    def watched(self, save: Callable[..., Path]) -> Callable[..., Path]:
        """`save`, with its operations counted."""

        def watch(*args: Any, **keys: Any) -> Path:
            self._saves, self._phase, self._counts = self._saves + 1, "prepare", Counter()
            self._tell("save")
            path = save(*args, **keys)
            self._phase = None
            self._tell("saved", dict(self._counts))
            return path

        return watch

    def happens(self, operation: str) -> None:
        """Before an operation."""
        if self._phase is None:
            return
        if self._phase == "prepare" and operation.startswith("open") and "/engine/" in operation:
            self._phase = "write"
        if operation.startswith("open") and ".manifest.json" in operation:
            self._phase = "publish"
        number, stop = self._counts[self._phase], self._stop
        self._counts[self._phase] += 1
        if stop and self._saves >= stop.save and (self._phase, number) == (stop.phase, stop.operation):
            self._tell("stopped", self._phase, operation)
            self._events.recv(MESSAGE)  # nothing comes but SIGKILL, or `go_on`

    def _counted(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **keys: Any) -> Any:
            self.happens(f"{name} {args[0]}")
            result = original(*args, **keys)
            if self._phase and name == "replace" and Path(args[1]).name == "latest":
                self._phase = "delete"
            return result

        return counted

    def _tell(self, *event: Any) -> None:
        self._events.send(pickle.dumps(event))


class Halved:
    """A file whose writes come in two halves."""

    def __init__(self, file: Any, happens: Callable[[str], None]) -> None:
        self._file, self._happens = file, happens

    def write(self, data: Any) -> int:
        """Half of it, something happens, the other half; the first half is in the file by then."""
        half = len(data) // 2
        self._file.write(data[:half])
        self._file.flush()
        self._happens(f"write {self._file.name}")
        self._file.write(data[half:])
        return len(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> "Halved":
        return self

    def __exit__(self, *exc: object) -> None:
        self._file.close()


def command_environment() -> dict[str, str]:
    """Of a command on this machine: a worker's without the launcher's variables."""
    return {key: value for key, value in worker_environment(0, 1, 0, {}).items() if key not in LAUNCHER}


def write_inputs(folder: Path) -> None:
    """train.yaml (`CONFIG`), data.bin/.idx and tokenizer/ in a folder."""
    (folder / "train.yaml").write_text(CONFIG)
    generator = np.random.default_rng(0)
    lengths = generator.integers(5, 60, 40).tolist()
    write_documents(folder / "data", [generator.integers(0, VOCAB, length).tolist() for length in lengths], VOCAB)
    tokenizer = train_bpe(["hello world " * 50], 300)
    assert vocab_size(tokenizer) == VOCAB
    save_tokenizer(tokenizer, folder / "tokenizer", "<|endoftext|>")


def children_of(pid: int) -> list[int]:
    """Process ids of a process's children."""
    with contextlib.suppress(FileNotFoundError):
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


if __name__ == "__main__":
    main()
