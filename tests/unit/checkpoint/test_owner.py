"""Two processes that both believe to own a run folder."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fmengine.checkpoint.find import find_newest
from fmengine.checkpoint.owner import RunOwner
from fmengine.errors import UserError
from support.checkpoints import save_step

HOLDER = """
import sys, pathlib
from fmengine.checkpoint.owner import RunOwner
owner = RunOwner(pathlib.Path(sys.argv[1]))
owner.check()
print("held", flush=True)
sys.stdin.read()
"""


def hold(run: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(run)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def test_the_second_is_told_who_the_first_is_and_death_frees(run: Path) -> None:
    first = hold(run)
    try:
        with pytest.raises(UserError, match=f"in use by process {first.pid} on .*; stop that run"):
            RunOwner(run)
        with pytest.raises(UserError):  # the refusal itself did not loosen the lock
            RunOwner(run)
    finally:
        first.kill()
        first.wait()
    with RunOwner(run) as owner:
        owner.check()


def test_check_does_not_loosen_the_lock(run: Path) -> None:
    with RunOwner(run) as owner:
        owner.check()
        second = subprocess.run(
            [sys.executable, "-c", HOLDER, str(run)], stdin=subprocess.DEVNULL, capture_output=True, text=True
        )
    assert second.returncode != 0
    assert f"in use by process {os.getpid()}" in second.stderr


def test_a_takeover_stops_the_save(run: Path) -> None:
    """Where there are no locks, another process writes itself into the file; the next save notices."""
    with RunOwner(run) as owner:
        save_step(run, 1, owner=owner)
        (run / "owner").write_text(json.dumps({"host": "other", "pid": 7, "started": "now"}))
        with pytest.raises(UserError, match="taken over by process 7 on other"):
            save_step(run, 2, owner=owner)
        (run / "owner").unlink()
        with pytest.raises(UserError, match="gone, and maybe the run folder"):
            save_step(run, 2, owner=owner)
    assert find_newest(run) == run / "checkpoints" / "step-00000001"
