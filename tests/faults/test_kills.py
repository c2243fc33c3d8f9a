"""kill -9 at any moment: the run goes on from its last whole checkpoint and ends where an undisturbed one does."""

import json
import os
import random
import select
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import torch

from fmengine.checkpoint.find import find_newest
from fmengine.checkpoint.manifest import ENGINE, read
from fmengine.checkpoint.reader import open_state
from support.faults import LIMIT, PHASES, Attempt, Child, Stop, Zygote, children_of, command_environment

KILLS = 30
STEPS, INTERVAL = 90, 2
"""More saves than `KILLS` attempts can make: at most two each."""

OPTIONS = {"train.steps": STEPS, "checkpoint.interval": INTERVAL, "checkpoint.keep": 1}
SETS = tuple(argument for key, value in OPTIONS.items() for argument in ("--set", f"{key}={value}"))


def attempt(run: Path, stop: Stop | None = None) -> Attempt:
    return Attempt(("train", "train.yaml", *SETS, "--set", f"run.dir={run.name}"), run.parent, stop)


def until_end(child: Child) -> tuple[dict[str, int], float]:
    """What the last save did to the disk, and the seconds to the end of the second save."""
    started, counts, saves, seconds = time.monotonic(), {}, 0, 0.0
    while (event := child.event()) != ("ended",):
        assert event is not None, "it hangs"
        if event[0] == "saved":
            counts, saves = event[1], saves + 1
            seconds = seconds if saves > 2 else time.monotonic() - started
    assert child.wait() == 0
    return counts, seconds


def kill_at_random(child: Child, delay: float) -> str:
    """Kill after `delay` seconds or, on a machine that has become fast, after the second save."""
    deadline, saves, where = time.monotonic() + delay, 0, "between saves"
    while saves < 2 and (event := child.event(max(0.0, deadline - time.monotonic()))) is not None:
        assert event != ("ended",), "it ended before it was killed"
        saves += event[0] == "saved"
        where = "in a save" if event[0] == "save" else "between saves"
    assert child.kill() == -signal.SIGKILL
    return where


def kill_in_save(child: Child) -> str:
    """Kill where the child stands still."""
    while (event := child.event()) is None or event[0] != "stopped":
        assert event not in (None, ("ended",)), "it did not come to the chosen operation"
    assert child.kill() == -signal.SIGKILL
    return str(event[1])


def step_of(run: Path) -> int:
    newest = find_newest(run, full=True)
    return 0 if newest is None else read(newest).step


def weights(run: Path) -> dict[str, torch.Tensor]:
    """Full fp32 weights and moments of the run's checkpoint."""
    newest = find_newest(run, full=True)
    assert newest is not None
    state = open_state(newest / ENGINE, read(newest))
    return {
        f"{name} {number}": tensor
        for name in state.names()
        for number, tensor in enumerate((state.weight(name), *state.moments(name)))
    }


def rows(run: Path, kind: str) -> list[int]:
    """Steps of the rows of metrics.jsonl."""
    found = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row["step"] for row in found if row["kind"] == kind]


def test_thirty_kills_end_in_the_undisturbed_weights(zygote: Zygote, folder: Path) -> None:
    choose = random.Random(20)
    straight, killed = folder / "straight", folder / "killed"
    counts, seconds = until_end(zygote.start(attempt(straight)))
    assert set(counts) == set(PHASES)
    phases = [PHASES[number % len(PHASES)] for number in range(KILLS // 2)]
    plans: list[Stop | None] = [None] * (KILLS - len(phases))
    plans += [Stop(choose.randrange(2), phase, choose.randrange(counts[phase])) for phase in phases]
    choose.shuffle(plans)
    landed: Counter[str] = Counter()
    step = 0
    for stop in plans:
        child = zygote.start(attempt(killed, stop))
        landed[kill_in_save(child) if stop else kill_at_random(child, choose.uniform(0, seconds))] += 1
        before, step = step, step_of(killed)
        assert step >= before, f"killed at {stop or 'random'}: {step} is left of {before}"
    assert step < STEPS, "the run ended before the last kill"
    until_end(zygote.start(attempt(killed)))
    assert sum(landed.values()) == KILLS
    assert all(landed[phase] for phase in PHASES)
    expected, found = weights(straight), weights(killed)
    assert found.keys() == expected.keys()
    assert [name for name, tensor in expected.items() if not torch.equal(found[name], tensor)] == []
    assert rows(killed, "train") == rows(straight, "train") == list(range(1, STEPS + 1))
    assert [path.name for path in (killed / "checkpoints").iterdir() if path.name.startswith(".")] == []


class Command:
    """`fmengine train` with two workers; its process tree is killed at the end, whatever happens."""

    def __init__(self, folder: Path) -> None:
        arguments = ["train", "train.yaml", *SETS, "--set", "train.steps=100000", "--workers", "2"]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "fmengine", *arguments],
            cwd=folder,
            env=command_environment(),
            bufsize=0,  # `select` does not see what a buffer holds
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def __enter__(self) -> "Command":
        return self

    def __exit__(self, *exc: object) -> None:
        self.process.kill()  # the workers die with it
        self.process.communicate()

    def read_to(self, word: str) -> str:
        """What it prints up to the first line with `word`."""
        assert self.process.stdout is not None
        text = ""
        while word not in text:
            assert select.select([self.process.stdout], [], [], LIMIT)[0], f"no {word!r} in: {text}"
            line = self.process.stdout.readline().decode()
            assert line, f"it ended without {word!r}: {text}"
            text += line
        return text

    def tree(self) -> list[int]:
        """A descriptor of each worker and of what it started, readable once that has ended; workers first."""
        workers = children_of(self.process.pid)
        assert len(workers) == 2
        below = [child for worker in workers for child in children_of(worker)]
        return [os.pidfd_open(pid) for pid in [*workers, *below]]


def ended(process: int) -> bool:
    return bool(select.select([process], [], [], LIMIT)[0])


def test_two_workers_of_the_command(folder: Path) -> None:
    """A worker killed: the command ends with its code. The command killed: its workers go too. Then it goes on."""
    run = folder / "run"
    with Command(folder) as command:
        assert "starting" in command.read_to("checkpoint at step 4:")
        tree = command.tree()
        signal.pidfd_send_signal(tree[1], signal.SIGKILL)
        _, errors = command.process.communicate(timeout=LIMIT)
        assert command.process.returncode == 128 + signal.SIGKILL
        assert b"rank 1 ended with exit code 137" in errors
        assert b"Traceback" not in errors
        assert all(ended(process) for process in tree)
    step = step_of(run)
    assert step >= 4
    with Command(folder) as command:
        command.read_to(f"going on from step {step}:")
        command.read_to(f"checkpoint at step {step + 2}:")
        tree = command.tree()
        command.process.kill()
        assert all(ended(process) for process in tree)
    assert step_of(run) >= step + 2
    steps = rows(run, "train")
    assert steps == list(range(1, len(steps) + 1))
