"""The save protocol: whatever happens in it, a whole checkpoint is found, and it is the right one."""

import errno
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fmengine.checkpoint.find import find_newest, verify
from fmengine.checkpoint.save import save
from fmengine.errors import UserError
from support.checkpoints import Faults, Killed, ThreadRanks, content, header, save_step, write_state

MOST_OPERATIONS = 200


def names(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").iterdir())


def assert_whole(run: Path, steps: set[int]) -> None:
    newest = find_newest(run)
    assert newest is not None
    manifest = verify(newest, full=True)
    assert manifest.step in steps
    assert content(newest) == manifest.step


def test_layout_and_manifest(run: Path) -> None:
    path = save_step(run, 100)
    assert path == run / "checkpoints" / "step-00000100"
    assert sorted(p.name for p in path.iterdir()) == ["COMPLETE", "engine", "manifest.json"]
    assert names(run) == ["latest", "step-00000100"]
    assert (run / "checkpoints" / "latest").read_text() == "step-00000100\n"
    manifest = verify(path)
    assert (manifest.format_version, manifest.step, manifest.samples) == (1, 100, 1600)
    assert set(manifest.files) == {"engine/layout.json", "engine/state/rank-0.pt"}
    assert manifest.files["engine/state/rank-0.pt"].bytes == 1000


def test_oldest_go_last(run: Path) -> None:
    for step in (1, 2, 3, 4):
        save_step(run, step, keep=2)
    assert names(run) == ["latest", "step-00000003", "step-00000004"]


def test_broken_ones_are_not_counted_as_kept(run: Path) -> None:
    for step in (1, 2):
        save_step(run, step, keep=2)
    (run / "checkpoints" / "step-00000002" / "engine" / "state" / "rank-0.pt").write_bytes(b"short")
    save_step(run, 3, keep=2)
    assert names(run) == ["latest", "step-00000001", "step-00000002", "step-00000003"]
    save_step(run, 4, keep=2)
    assert names(run) == ["latest", "step-00000003", "step-00000004"]


def test_old_marker_goes_before_old_files(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_step(run, 1, keep=1)
    events: list[str] = []
    unlink, replace = os.unlink, os.replace

    def seen_unlink(path: object, **keys: object) -> None:
        events.append(f"unlink {Path(str(path)).name}")
        unlink(path, **keys)  # type: ignore[arg-type]

    def seen_replace(source: object, target: object) -> None:
        events.append(f"replace {Path(str(target)).name}")
        replace(source, target)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "unlink", seen_unlink)
    monkeypatch.setattr(os, "replace", seen_replace)
    save_step(run, 2, keep=1)
    kept = [event for event in events if "layout" not in event]
    assert kept[:4] == ["replace manifest.json", "replace COMPLETE", "replace latest", "unlink COMPLETE"]
    assert set(kept[4:]) == {"unlink manifest.json", "unlink rank-0.pt"}


def test_same_step_again_is_left(run: Path) -> None:
    path = save_step(run, 1)
    before = (path / "manifest.json").stat().st_mtime_ns
    assert save_step(run, 1) == path
    assert (path / "manifest.json").stat().st_mtime_ns == before


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_killed_at_every_operation(tmp_path: Path, after: bool) -> None:
    """A kill before or after any change to the disk: the old or the new one is found, and the next save works."""
    for fail_at in range(MOST_OPERATIONS):
        run = tmp_path / str(fail_at)
        run.mkdir()
        save_step(run, 1, keep=1)
        with pytest.MonkeyPatch.context() as patch:
            faults = Faults(patch, fail_at, Killed(), after)
            try:
                save_step(run, 2, keep=1)
            except Killed:
                pass
            else:
                assert faults.count <= fail_at
                break
        assert_whole(run, {1, 2})
        save_step(run, 2, keep=1)  # where a resumed run comes by again, whatever the killed save left of it
        assert_whole(run, {2})
        save_step(run, 3, keep=1)
        assert_whole(run, {3})
        assert names(run) == ["latest", "step-00000003"]
    else:
        pytest.fail("the save never ended")
    assert fail_at > 20


@pytest.mark.parametrize("fails", [errno.ENOSPC, errno.EACCES])
def test_disk_refuses_at_every_operation(tmp_path: Path, fails: int) -> None:
    """The system's refusal anywhere is one clear line, and the previous checkpoint stays.

    Some refusals do no harm: a folder that is there already, an old checkpoint that cannot be deleted.
    """
    refusals: list[str] = []
    for fail_at in range(MOST_OPERATIONS):
        run = tmp_path / str(fail_at)
        run.mkdir()
        save_step(run, 1, keep=1)
        with pytest.MonkeyPatch.context() as patch:
            faults = Faults(patch, fail_at, OSError(fails, os.strerror(fails)))
            text = refusal(run)
        assert_whole(run, {1, 2} if text else {2})
        refusals += [text] if text else []
        if faults.count <= fail_at:
            break
    else:
        pytest.fail("the save never ended")
    assert len(refusals) > 15
    assert all(os.strerror(fails) in text and "saving step 2 on rank 0" in text for text in refusals)


def refusal(run: Path) -> str:
    """What the user reads when step 2 cannot be saved; empty when it was."""
    try:
        save_step(run, 2, keep=1)
    except UserError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("bad_rank", [0, 1, 2])
def test_one_ranks_full_disk_reaches_all(run: Path, bad_rank: int) -> None:
    def work(rank: object) -> Path:
        def write(folder: Path) -> None:
            write_state(2, rank.rank)(folder)  # type: ignore[attr-defined]
            if rank.rank == bad_rank:  # type: ignore[attr-defined]
                raise OSError(errno.ENOSPC, "No space left on device", "some/file")

        return save(run, header(2), write, collective=rank, keep=1)  # type: ignore[arg-type]

    save_step(run, 1)
    results = ThreadRanks(3).run(work)  # type: ignore[arg-type]
    assert all(type(result) is UserError for result in results), results
    assert {str(result) for result in results} == {
        f"some/file: No space left on device while saving step 2 on rank {bad_rank}; free or repair the disk and resume"
    }
    assert_whole(run, {1})


def test_rank_0s_rename_fails_on_all(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(source: object, target: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(target))

    monkeypatch.setattr(os, "rename", refuse)
    results = ThreadRanks(2).run(
        lambda rank: save(run, header(2), write_state(2, rank.rank), collective=rank, keep=1)  # type: ignore[arg-type]
    )
    assert [type(result) for result in results] == [UserError, UserError]
    assert "step-00000002: Permission denied" in str(results[1])


def test_a_bug_in_one_ranks_state_reaches_all(run: Path) -> None:
    def work(rank: object) -> Path:
        def write(folder: Path) -> None:
            if rank.rank == 1:  # type: ignore[attr-defined]
                raise KeyError("lr")

        return save(run, header(2), write, collective=rank, keep=1)  # type: ignore[arg-type]

    results = ThreadRanks(2).run(work)  # type: ignore[arg-type]
    assert [type(result) for result in results] == [RuntimeError, RuntimeError]
    assert str(results[0]) == "KeyError: 'lr' while saving step 2 on rank 1"
    assert isinstance(results[1].__cause__, KeyError)


def test_ranks_share_the_hashing(run: Path) -> None:
    results = ThreadRanks(3).run(
        lambda rank: save(run, header(5), write_state(5, rank.rank), collective=rank, keep=1)  # type: ignore[arg-type]
    )
    assert results == [run / "checkpoints" / "step-00000005"] * 3
    assert len(verify(results[0]).files) == 4


WRITER = """
import sys, pathlib
from support.checkpoints import save_step
run = pathlib.Path(sys.argv[1])
for step in range(int(sys.argv[2]), 10**6):
    save_step(run, step, keep=2)
    print(step, flush=True)
"""


def test_kill_9_of_a_real_writer(run: Path) -> None:
    """Killed again and again while it does nothing but save: what it had announced as saved is there, or newer."""
    tests = Path(__file__).parents[2]
    step, pick = 1, random.Random(0)
    for _ in range(8):
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(run), str(step)],
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": str(tests)},
        )
        assert writer.stdout is not None
        announced = 0
        for _ in range(pick.randrange(1, 4)):
            announced = int(writer.stdout.readline())
        spin = pick.randrange(200_000)
        while spin:
            spin -= 1
        writer.send_signal(signal.SIGKILL)
        announced = int(([announced, *writer.stdout.read().split()])[-1])
        writer.wait()
        newest = find_newest(run)
        assert newest is not None
        found = verify(newest, full=True).step
        assert announced <= found <= announced + 1
        assert content(newest) == found % 256
        step = found + 1
