"""The rows of the doctor's table, and running the probes."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

OK, ABSENT, FAILS = "ok", "absent", "fails"

SECONDS = 300
"""Longest time for a probe: importing all of DeepSpeed from a cold shared file system takes minutes."""


@dataclass(frozen=True)
class Row:
    """A line of the table.

    Attributes:
        name: the component, or what of the machine.
        state: "ok", "absent" or "fails".
        expected: whether it has to be ok.
        version: of the component; "" where it has none.
        where: "cpu" or "cuda:0", where something was computed; "" where nothing was.
        detail: in a few words.
        advice: what to do; "" where nothing is wrong.
    """

    name: str
    state: str
    expected: bool
    version: str = ""
    where: str = ""
    detail: str = ""
    advice: str = ""

    @property
    def wrong(self) -> bool:
        """Whether it makes the doctor's exit code 1."""
        return self.expected and self.state != OK


def probe_command(name: str) -> list[str]:
    """The program that runs a probe; a file in the current folder is no module of it."""
    return [sys.executable, "-P", "-m", "fmengine.doctor.probe", name]


def run_probes(
    names: Sequence[str], environ: Mapping[str, str], *, seconds: float = SECONDS, workers: int | None = None
) -> dict[str, dict[str, Any]]:
    """Run probes, each in a process of its own and as many at a time as there are cores.

    Returns:
        Name of a probe to its state and what goes with it, whatever happened to its process.
    """
    workers = workers or min(8, len(os.sched_getaffinity(0)))
    with ThreadPoolExecutor(max_workers=workers) as pool:
        results = pool.map(lambda name: run_probe(probe_command(name), environ, seconds), names)
        return dict(zip(names, results, strict=True))


def run_probe(command: Sequence[str], environ: Mapping[str, str], seconds: float) -> dict[str, Any]:
    """Run one; a crash, a hang or nonsense is a failure like any other."""
    try:
        done = subprocess.run(
            command,
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"state": FAILS, "detail": f"did not end in {seconds:.0f} s"}
    lines = [line for line in done.stdout.splitlines() if line.strip()]
    if done.returncode == 0 and lines:
        try:
            result: dict[str, Any] = json.loads(lines[-1])
            return result
        except ValueError:
            pass
    return {"state": FAILS, "detail": _ending(done.returncode, done.stderr)}


def _ending(code: int, stderr: str) -> str:
    if code == -signal.SIGILL:
        return "killed by SIGILL: compiled for another kind of processor"
    if code < 0:
        return f"killed by {signal.Signals(-code).name}"
    last = next((line.strip() for line in reversed(stderr.splitlines()) if line.strip()), "")
    return f"ended with exit code {code}{': ' if last else ''}{last}"
