"""A disk that is full or read-only, a run folder that goes away, streams that are closed: one line, nothing lost."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fmengine.checkpoint.find import find_newest
from support.faults import LIMIT, Attempt, Child, Done, Stop, Zygote, command_environment

TRAIN = ("train", "train.yaml", "--set", "run.dir=disk/run", "--set", "checkpoint.keep=1")


def refused(done: Done, text: str) -> None:
    """Exit code 2 and one line."""
    assert done.code == 2, done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("fmengine: error: ")
    assert text in line


def fill(file: Path) -> None:
    """Write into a file until the disk is full."""
    with file.open("wb", buffering=0) as filler:
        for size in (1 << 16, 1 << 10, 1):
            try:
                while filler.write(b"x" * size) == size:
                    pass
            except OSError:  # full, for this size
                continue


def stopped(zygote: Zygote, folder: Path, arguments: tuple[str, ...], stop: Stop) -> Child:
    """A run that stands still at an operation of a save."""
    child = zygote.start(Attempt(arguments, folder, stop))
    while (event := child.event()) is None or event[0] != "stopped":
        assert event not in (None, ("ended",)), (folder / "stderr").read_text()
    return child


def end(child: Child, folder: Path) -> Done:
    """Let it go on, to its end."""
    child.go_on()
    while (event := child.event()) != ("ended",):
        assert event is not None, "it hangs"
    return Done(child.wait(), (folder / "stdout").read_text(), (folder / "stderr").read_text())


def test_a_disk_without_room_is_found_before_the_first_step(zygote: Zygote, folder: Path, small_disk: Path) -> None:
    for command in ("train", "validate"):
        done = zygote.run(folder, command, "train.yaml", "--set", "run.dir=disk/run", "--set", "checkpoint.keep=9")
        refused(done, "run.dir: 4.19 MB free at")
    fill(small_disk / "filler")
    refused(zygote.run(folder, *TRAIN), "run.dir: cannot write in")
    assert [path.name for path in small_disk.iterdir()] == ["filler"]


def test_a_disk_that_fills_up_in_a_save(zygote: Zygote, folder: Path, small_disk: Path) -> None:
    """At whatever moment; the checkpoint before stays whole, and the run goes on once there is room."""
    for phase, operation in (("prepare", 2), ("write", 0), ("write", 40), ("publish", 0)):
        child = stopped(zygote, folder, TRAIN, Stop(1, phase, operation))
        fill(small_disk / "filler")
        done = end(child, folder)
        refused(done, "No space left on device while saving step 4 on rank 0; free or repair the disk and resume")
        newest = find_newest(small_disk / "run", full=True)
        assert newest is not None
        assert newest.name == "step-00000002"
        (small_disk / "filler").unlink()
        assert not list(newest.parent.glob(".staging*"))
        done = zygote.run(folder, *TRAIN)
        assert (done.code, done.stderr) == (0, "")
        assert "going on from step 2" in done.stdout
        shutil.rmtree(small_disk / "run")


def test_a_full_disk_elsewhere(zygote: Zygote, folder: Path, run: Path, small_disk: Path) -> None:
    (folder / "text.txt").write_text("hello world " * 20000)
    fill(small_disk / "filler")
    refused(zygote.run(folder, "export", "run", "--out", "disk/model"), "No space left on device; nothing was exported")
    prepare = ("prepare", "text.txt", "--tokenizer", "tokenizer", "--out", "disk/data")
    refused(zygote.run(folder, *prepare), "No space left on device; nothing was kept")
    assert [path.name for path in small_disk.iterdir()] == ["filler"]


def test_a_read_only_folder(zygote: Zygote, folder: Path, run: Path, read_only: Path) -> None:
    (folder / "text.txt").write_text("hello")
    for command in ("train", "validate"):
        done = zygote.run(folder, command, "train.yaml", "--set", "run.dir=disk/run")
        refused(done, f"run.dir: cannot write in {read_only}: ")
    refused(zygote.run(folder, "export", "run", "--out", "disk/model"), "; nothing was exported")
    prepare = ("prepare", "text.txt", "--tokenizer", "tokenizer", "--out", "disk/data")
    refused(zygote.run(folder, *prepare), "; nothing was kept")


@pytest.mark.parametrize("lost", ["", "owner"])
def test_the_run_folder_goes_away(zygote: Zygote, folder: Path, lost: str) -> None:
    child = stopped(zygote, folder, ("train", "train.yaml"), Stop(1, "prepare", 1))
    path = folder / "run" / lost
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    refused(end(child, folder), "run/owner: gone, and maybe the run folder with it; this process stops saving")


@pytest.mark.parametrize("streams", ["<&- >&- 2>&-", ">/dev/full"])
def test_streams_that_take_nothing(folder: Path, streams: str) -> None:
    """The run itself goes to its end; that its lines are lost is said where it can be.

    Nor is there a HOME, and a process that was killed has left the lock of DeepSpeed's compiler behind.
    """
    environ = {key: value for key, value in command_environment().items() if key != "HOME"}
    environ["TORCH_EXTENSIONS_DIR"] = str(folder / "extensions")
    (folder / "extensions" / "deepspeed_shm_comm").mkdir(parents=True)
    (folder / "extensions" / "deepspeed_shm_comm" / "lock").touch()
    command = f"exec {sys.executable} -m fmengine train train.yaml {streams}"
    done = subprocess.run(command, shell=True, cwd=folder, env=environ, capture_output=True, text=True, timeout=LIMIT)
    if streams == ">/dev/full":
        assert (done.returncode, done.stderr) in (
            (0, ""),
            (2, "fmengine: error: standard output: No space left on device\n"),
        )
    else:
        assert (done.returncode, done.stderr) == (0, "")
    assert (folder / "run" / "checkpoints" / "step-00000004" / "COMPLETE").is_file()
    assert (folder / "run" / "metrics.jsonl").read_text().count('"kind": "train"') == 4


def test_output_that_the_disk_has_no_room_for(folder: Path) -> None:
    command = f"exec {sys.executable} -m fmengine validate train.yaml >/dev/full"
    for unbuffered in ("", "1"):  # the error comes from the print, or from the flush at the end
        environ = command_environment() | {"PYTHONUNBUFFERED": unbuffered}
        done = subprocess.run(command, shell=True, cwd=folder, env=environ, capture_output=True, text=True, check=False)
        refused(Done(done.returncode, "", done.stderr), "standard output: No space left on device")


def test_paths_with_spaces_letters_and_links(zygote: Zygote, folder: Path) -> None:
    place = folder / "spaß und 模型"
    place.mkdir()
    (folder / "link").symlink_to(place)
    for suffix in ("bin", "idx"):
        shutil.copy(folder / f"data.{suffix}", place / f"da ta.{suffix}")
    shutil.copy(folder / "train.yaml", place / "t é.yaml")
    sets = ("--set", f"run.dir={place}/r un", "--set", "data.train=link/da ta")
    assert zygote.run(folder, "train", place / "t é.yaml", *sets).code == 0
    assert zygote.run(folder, "export", "link/r un", "--out", "link/mo del").code == 0
    done = zygote.run(folder, "generate", place / "r un", "--prompt", "héllo", "--max-new-tokens", "2")
    assert done.code == 0
    assert done.stdout.startswith("héllo")
