"""Multi-process tests on CPU: functions run on every rank of a gloo group, results come back.

Importing torch and DeepSpeed takes seconds a process, so processes are shared: a `WorkerPool` starts
`world_size` of them once and then runs one function after another; the process group stays. A test
file uses the session's pools through the `workers` fixture (tests/conftest.py):

    def ranks_sum(x: float) -> float:                 # runs on each rank; a module-level function
        tensor = torch.tensor(x + torch.distributed.get_rank())
        torch.distributed.all_reduce(tensor)
        return tensor.item()

    def test_sum(workers):
        assert workers(2).run(ranks_sum, 1.0) == [3.0, 3.0]

Arguments and results are pickled. Assert on results in the test: pytest does not rewrite the
assertions of worker functions. Where a library keeps process globals (AutoTP's groups), ask for
processes of their own by a name: `workers(2, "tensor-parallel")`.

A call that raises on any rank, or takes longer than its limit, kills the pool's processes and raises
`WorkerError` with the ranks' tracebacks or stacks and the end of their output; the next call starts
new processes.
"""

import contextlib
import importlib.util
import inspect
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Literal, Self

Backend = Literal["deepspeed", "torch", "none"]

TESTS = Path(__file__).resolve().parent.parent
GRACE = 3.0  # seconds that the other ranks get to answer after one has failed
SHOWN_OUTPUT = 20000  # characters of each rank's output that a failure shows


class WorkerError(AssertionError):
    """A rank raised, died or hung; the message holds what is known of every rank."""


def free_port() -> int:
    """A TCP port on 127.0.0.1 that nothing listens on at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def worker_environment(rank: int, world_size: int, port: int, extra: Mapping[str, str]) -> dict[str, str]:
    """What torchrun would set, for one CPU rank on this host, on top of this process's environment."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("SLURM_", "PYTEST_"))}
    # DeepSpeed's shared-memory all-reduce is on where LOCAL_SIZE is the world size; it ignores groups.
    environment.pop("LOCAL_SIZE", None)
    python_path = [str(TESTS), *filter(None, [environment.get("PYTHONPATH")])]
    environment |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONUNBUFFERED": "1",
        "PYTHONPATH": os.pathsep.join(python_path),
    }
    return {**environment, **extra}


def describe(function: Callable[..., Any] | str) -> tuple[str, str | None, str]:
    """How a worker finds the function: (module, its file or None where the name is enough, qualified name)."""
    if isinstance(function, str):
        module, _, qualified = function.partition(":")
        return module, None, qualified
    if "<" in function.__qualname__:
        raise ValueError(f"{function.__qualname__} is local; a worker function must be at the top of its module")
    module = function.__module__
    with contextlib.suppress(ImportError, ValueError):
        if module.split(".")[0] in ("support", "fmengine") and importlib.util.find_spec(module):
            return module, None, function.__qualname__
    return module, inspect.getsourcefile(function), function.__qualname__


class Rank:
    """One worker process, its socket and the file that takes its output."""

    def __init__(self, rank: int, world_size: int, port: int, folder: Path, backend: str, extra: Mapping[str, str]):
        self.rank = rank
        self.output = folder / f"rank-{rank}.log"
        self.shown_from = 0
        ours, theirs = socket.socketpair()
        with self.output.open("wb") as sink, theirs:
            self.process = subprocess.Popen(
                [sys.executable, str(Path(__file__).with_name("worker.py")), str(theirs.fileno()), backend],
                env=worker_environment(rank, world_size, port, extra),
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        self.connection = Connection(ours.detach())

    def send(self, call: bytes) -> None:
        """Give it a call; what it prints from here on belongs to that call."""
        self.shown_from = self.output.stat().st_size
        with contextlib.suppress(OSError):  # it died in between: its answer will say so
            self.connection.send_bytes(call)

    def receive(self) -> tuple[bool, Any]:
        """Its answer: (True, result), or (False, traceback)."""
        try:
            succeeded, result = pickle.loads(self.connection.recv_bytes())
        except (EOFError, OSError):
            return False, f"the process died with exit code {self.process.wait()}"
        return succeeded, result

    def dump_stacks(self) -> None:
        """Have faulthandler write every thread's stack into the output."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGUSR1)

    def kill(self) -> None:
        """End the process and whatever it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.connection.close()

    def tail(self) -> str:
        """The end of what it printed during the last call."""
        with self.output.open("rb") as source:
            source.seek(self.shown_from)
            return source.read().decode(errors="replace")[-SHOWN_OUTPUT:]


class WorkerPool:
    """`world_size` processes on this host that run functions together; see the module's docstring."""

    def __init__(
        self,
        world_size: int,
        *,
        backend: Backend = "deepspeed",
        timeout: float = 300.0,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Nothing starts before the first call.

        Args:
            world_size: number of ranks.
            backend: how the ranks join the process group before the first call.
            timeout: limit of one call in seconds, the start of the processes included.
            environment: variables of the workers, on top of what torchrun would set.
        """
        self.world_size = world_size
        self.timeout = timeout
        self._backend: Backend = backend
        self._environment = dict(environment or {})
        self._ranks: list[Rank] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def run(
        self, function: Callable[..., Any] | str, *args: Any, timeout: float | None = None, **kwargs: Any
    ) -> list[Any]:
        """Call a module-level function (or "module:function") on every rank; its results, in rank order.

        Raises:
            WorkerError: a rank raised, died, or did not answer within the limit.
        """
        deadline = time.monotonic() + (timeout or self.timeout)
        call = pickle.dumps((*describe(function), pickle.dumps((args, kwargs))))
        name = function if isinstance(function, str) else function.__qualname__
        try:
            if not self._ranks:
                self._start()
                self._collect("start", deadline)
            for rank in self._ranks:
                rank.send(call)
            return self._collect(name, deadline)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Kill the processes; a later call starts new ones."""
        for rank in self._ranks:
            rank.kill()
        self._ranks = []
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def _start(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="workers-")
        port = free_port()
        for rank in range(self.world_size):
            self._ranks.append(
                Rank(rank, self.world_size, port, Path(self._folder.name), self._backend, self._environment)
            )

    def _collect(self, name: str, deadline: float) -> list[Any]:
        results: dict[int, Any] = {}
        failures: dict[int, str] = {}
        waiting = {rank.connection: rank for rank in self._ranks}
        while waiting:
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for connection in ready:
                rank = waiting.pop(connection)  # type: ignore[call-overload]
                succeeded, result = rank.receive()
                if succeeded:
                    results[rank.rank] = result
                else:
                    deadline = min(deadline, time.monotonic() + GRACE)
                    failures[rank.rank] = result
        if failures or waiting:
            raise WorkerError(self._explain(name, failures, list(waiting.values())))
        return [results[rank] for rank in range(self.world_size)]

    def _explain(self, name: str, failures: Mapping[int, str], silent: list[Rank]) -> str:
        for rank in silent:
            rank.dump_stacks()
        if silent:
            time.sleep(0.5)  # faulthandler writes at once, but says nothing when it is done
        why = "failed" if failures else "took longer than its limit"
        lines = [f"{name} {why} on {self.world_size} ranks"]
        for rank in self._ranks:
            fate = "raised" if rank.rank in failures else "did not answer" if rank in silent else "finished"
            lines.append(f"--- rank {rank.rank}: {fate}")
            lines.append(failures.get(rank.rank, ""))
            if tail := rank.tail():
                lines.append(f"--- rank {rank.rank} printed:\n{tail}")
        return "\n".join(filter(None, lines))


def run_workers(
    function: Callable[..., Any] | str,
    world_size: int,
    *args: Any,
    backend: Backend = "deepspeed",
    timeout: float = 300.0,
    environment: Mapping[str, str] | None = None,
    **kwargs: Any,
) -> list[Any]:
    """Call a function once in new processes; its results, in rank order. See `WorkerPool`."""
    with WorkerPool(world_size, backend=backend, timeout=timeout, environment=environment) as pool:
        return pool.run(function, *args, **kwargs)
