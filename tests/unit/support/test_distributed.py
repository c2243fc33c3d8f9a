"""The multi-process helper itself: results, a failing rank, a dying rank, a hanging rank."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from support.distributed import TESTS, WorkerError, WorkerPool


@dataclass
class Case:
    value: int


def add_ranks(case: Case, *, scale: int) -> Case:
    total = torch.tensor(case.value + torch.distributed.get_rank())
    torch.distributed.all_reduce(total)
    return Case(int(total) * scale)


def make_tensor() -> torch.Tensor:
    return torch.full((3,), float(torch.distributed.get_rank()), requires_grad=True)


def process_id() -> int:
    return os.getpid()


def threads() -> tuple[int, str]:
    return torch.get_num_threads(), os.environ["OMP_NUM_THREADS"]


def fail_on_one() -> None:
    print(f"I am rank {torch.distributed.get_rank()}")
    if torch.distributed.get_rank() == 1:
        raise ValueError("only here")
    torch.distributed.barrier()


def die_on_one() -> None:
    if torch.distributed.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGSEGV)
    torch.distributed.barrier()


def hang_on_one() -> None:
    if torch.distributed.get_rank() == 0:
        torch.distributed.barrier()


def unpicklable() -> object:
    return lambda: None


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    with WorkerPool(2, backend="torch", timeout=120) as started:
        yield started


def test_results_come_back_in_rank_order_from_the_same_processes(pool: WorkerPool) -> None:
    assert pool.run(add_ranks, Case(1), scale=10) == [Case(30), Case(30)]
    tensors = pool.run(make_tensor)
    assert [tensor.tolist() for tensor in tensors] == [[0.0] * 3, [1.0] * 3]
    first, second = pool.run(process_id), pool.run(process_id)
    assert first == second
    assert len(set(first)) == 2
    assert pool.run(threads) == [(1, "1"), (1, "1")]
    assert pool.run("os:getpid") == first


def test_a_failing_rank_fails_the_call_while_the_others_wait(pool: WorkerPool) -> None:
    before = pool.run(process_id)
    with pytest.raises(WorkerError) as failure:
        pool.run(fail_on_one)
    message = str(failure.value)
    assert 'raise ValueError("only here")' in message
    assert "rank 0: did not answer" in message
    assert "in barrier" in message  # the stack of the rank that waits
    assert "I am rank 1" in message
    for pid in before:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    assert pool.run(add_ranks, Case(0), scale=1) == [Case(1), Case(1)]


def test_a_dying_rank_is_told_by_its_exit_code(pool: WorkerPool) -> None:
    with pytest.raises(WorkerError, match="exit code -11") as failure:
        pool.run(die_on_one)
    assert "Segmentation fault" in str(failure.value)


def test_a_hanging_rank_is_killed_at_the_limit_and_shows_its_stack(pool: WorkerPool) -> None:
    pool.run(process_id)
    with pytest.raises(WorkerError, match="took longer than its limit") as failure:
        pool.run(hang_on_one, timeout=2)
    message = str(failure.value)
    assert "hang_on_one" in message
    assert "rank 1: finished" in message


def test_a_result_that_cannot_be_pickled_is_a_failure(pool: WorkerPool) -> None:
    with pytest.raises(WorkerError, match=r"pickle.*lambda|lambda.*pickle"):
        pool.run(unpicklable)


def test_a_local_function_is_refused(pool: WorkerPool) -> None:
    with pytest.raises(ValueError, match="top of its module"):
        pool.run(lambda: None)


def test_workers_die_with_the_test_run() -> None:
    """Not even SIGKILL of pytest may leave ranks behind, which would spin in a collective."""
    script = (
        "import os, signal\n"
        "from support.distributed import WorkerPool\n"
        "pool = WorkerPool(1, backend='none')\n"
        "print(pool.run('os:getpid')[0], flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    ended = subprocess.run([sys.executable, "-c", script], cwd=TESTS, capture_output=True, text=True, timeout=60)
    pid = int(ended.stdout)
    state = ""
    for _ in range(1000):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return
        if state == "Z":
            return
        os.sched_yield()
    pytest.fail(f"worker {pid} is still there, state {state}")
