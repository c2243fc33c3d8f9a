import os
from pathlib import Path
from typing import Any

import pytest

from fmengine.start.folders import ROOM, VARIABLES, choose, local_rank, unusable, writable
from support.machines import machine

OWN = f"fmengine-{os.getuid()}-process-4711"


def test_every_cache_is_in_one_folder(tmp_path: Path) -> None:
    result = choose({"TMPDIR": str(tmp_path), "HOME": str(tmp_path)}, machine())
    base = tmp_path / OWN
    assert result.changes == {
        "FMENGINE_CACHES": str(base),
        **{name: str(base / "rank-0" / folder) for name, folder in VARIABLES.items()},
    }
    assert all(Path(result.changes[name] or "").is_dir() for name in VARIABLES)
    assert base.stat().st_mode & 0o777 == 0o700
    assert (result.lines, result.problems, result.temporary) == ([], [], base)


@pytest.mark.parametrize(
    ("environ", "name"),
    [
        ({"SLURM_JOB_ID": "12", "SLURM_STEP_ID": "3", "SLURM_LOCALID": "2"}, "slurm-12-3/rank-2"),
        ({"TORCHELASTIC_RUN_ID": "a1b2-c3", "LOCAL_RANK": "1"}, "torchrun-a1b2-c3/rank-1"),
        ({"TORCHELASTIC_RUN_ID": "none", "LOCAL_RANK": "1"}, "process-4711/rank-1"),
        ({"TORCHELASTIC_RUN_ID": "../../x"}, "process-4711/rank-0"),
        ({"SLURM_JOB_ID": "../x", "SLURM_LOCALID": "x"}, "process-4711/rank-0"),
    ],
)
def test_a_folder_a_job_and_rank(tmp_path: Path, environ: dict[str, str], name: str) -> None:
    result = choose({"TMPDIR": str(tmp_path), "HOME": str(tmp_path), **environ}, machine())
    expected = tmp_path / f"fmengine-{os.getuid()}-{name}"
    assert result.changes["TRITON_CACHE_DIR"] == str(expected / "triton")
    assert (result.temporary is None) == ("process" not in name)  # a job's other ranks are still there


def test_a_local_worker_has_its_own_in_its_parents(tmp_path: Path) -> None:
    environ = {"TMPDIR": str(tmp_path)}
    parent = choose(environ, machine())
    environ |= {name: value for name, value in parent.changes.items() if value}
    worker = choose({**environ, "LOCAL_RANK": "3"}, machine(process="4712"))
    base = tmp_path / OWN
    assert {Path(worker.changes[name] or "").parent for name in VARIABLES} == {base / "rank-3"}
    assert worker.changes["HOME"] == str(base / "rank-3" / "home")
    assert worker.temporary is None


def test_a_users_own_place_stays(tmp_path: Path) -> None:
    own = str(tmp_path / "to" / "be" / "made")
    result = choose({"TMPDIR": str(tmp_path), "HF_HOME": own}, machine())
    assert "HF_HOME" not in result.changes
    assert result.lines == []
    assert not Path(own).exists()


def test_a_users_own_place_that_cannot_be_written_to(tmp_path: Path) -> None:
    result = choose({"TMPDIR": str(tmp_path), "HF_HOME": "/dev/null/x"}, machine())
    assert result.changes["HF_HOME"] == str(tmp_path / OWN / "rank-0" / "huggingface")
    assert result.lines == [f"HF_HOME=/dev/null/x cannot be written to: it goes to {tmp_path / OWN}"]


def test_what_the_image_compiled_stays(tmp_path: Path) -> None:
    (tmp_path / "image" / "torch_extensions").mkdir(parents=True)
    image = machine(prefix=tmp_path / "image")
    environ = {"TMPDIR": str(tmp_path)}
    assert "TORCH_EXTENSIONS_DIR" not in choose(environ, image).changes
    baked = str(tmp_path / "image" / "elsewhere")
    assert "TORCH_EXTENSIONS_DIR" not in choose({**environ, "TORCH_EXTENSIONS_DIR": baked}, image).changes
    assert "TORCH_EXTENSIONS_DIR" in choose(environ, machine()).changes


@pytest.fixture
def candidates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    """Folders in place of /tmp, /dev/shm and the current one."""
    names = {"/tmp": tmp_path / "t", "/dev/shm": tmp_path / "s", "cwd": tmp_path / "c"}
    for folder in names.values():
        folder.mkdir()
    from fmengine.start import folders

    monkeypatch.setattr(folders, "Path", lambda text: names.get(str(text), Path(text)))
    return names


def fallback(environ: dict[str, str], bad: set[Path], cwd: Path) -> Any:
    def free(folder: Path) -> int:
        return ROOM - 1 if folder in bad else ROOM

    return choose(environ, machine(cwd=cwd, free_bytes=free))


def test_a_missing_tmpdir(tmp_path: Path, candidates: dict[str, Path]) -> None:
    result = fallback({"TMPDIR": str(tmp_path / "none")}, set(), candidates["cwd"])
    assert result.changes["FMENGINE_CACHES"] == str(candidates["/tmp"] / OWN)
    assert result.changes["TMPDIR"] == str(candidates["/tmp"])
    assert result.lines == [
        f"TMPDIR={tmp_path / 'none'} is no folder here: temporary files and caches go elsewhere",
    ]


def test_a_full_tmpdir_and_a_full_tmp(tmp_path: Path, candidates: dict[str, Path]) -> None:
    result = fallback({"TMPDIR": str(tmp_path)}, {tmp_path, candidates["/tmp"]}, candidates["cwd"])
    assert result.changes["TMPDIR"] == str(candidates["/dev/shm"])
    assert f"TMPDIR={tmp_path} has less than 64 MB free" in result.lines[0]


def test_the_current_folder_comes_last(candidates: dict[str, Path]) -> None:
    result = fallback({}, {candidates["/tmp"], candidates["/dev/shm"]}, candidates["cwd"])
    assert result.changes["FMENGINE_CACHES"] == str(candidates["cwd"] / OWN)
    assert result.lines == []


def test_no_place_at_all(candidates: dict[str, Path]) -> None:
    result = fallback({}, set(candidates.values()), candidates["cwd"])
    assert result.changes == {}
    assert "no place for temporary files: none of" in result.problems[0]
    assert "set TMPDIR" in result.problems[0]


@pytest.mark.parametrize("kind", ["link", "open", "file"])
def test_a_folder_that_somebody_else_may_have_made(tmp_path: Path, candidates: dict[str, Path], kind: str) -> None:
    """Code is loaded from the caches."""
    place = tmp_path / OWN
    if kind == "link":
        place.symlink_to(candidates["cwd"])
    elif kind == "open":
        place.mkdir()
        place.chmod(0o777)
    else:
        place.touch()
    result = fallback({"TMPDIR": str(tmp_path)}, set(), candidates["cwd"])
    assert result.changes["FMENGINE_CACHES"] == str(candidates["/tmp"] / OWN)
    assert OWN in result.lines[0] or "cannot be written to" in result.lines[0]


def test_another_users_folder(tmp_path: Path, candidates: dict[str, Path]) -> None:
    (tmp_path / f"fmengine-{os.getuid() + 1}-process-4711").mkdir(mode=0o700)
    result = choose({"TMPDIR": str(tmp_path)}, machine(uid=os.getuid() + 1))
    assert result.problems  # nor can its own be made in the other places, by this user


def test_usable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert unusable(tmp_path, machine()) is None
    assert [*tmp_path.iterdir()] == []

    def refuse(path: Path, data: bytes) -> int:
        raise OSError(122, "Disk quota exceeded")

    monkeypatch.setattr(Path, "write_bytes", refuse)
    assert unusable(tmp_path, machine()) == "cannot be written to (Disk quota exceeded)"


def test_writable(tmp_path: Path) -> None:
    assert writable(tmp_path / "a" / "b", machine())
    assert not writable(tmp_path / "a", machine(free_bytes=lambda folder: 0))
    (tmp_path / "file").touch()
    assert not writable(tmp_path / "file" / "x", machine())
    assert not writable(Path("/proc/x"), machine()) or os.getuid() == 0


@pytest.mark.parametrize("home", [None, "", "/", "/nonexistent"])
def test_a_home_that_is_none(tmp_path: Path, home: str | None) -> None:
    environ = {"TMPDIR": str(tmp_path), **({} if home is None else {"HOME": home})}
    changes = choose(environ, machine()).changes
    assert changes["HOME"] == str(tmp_path / OWN / "rank-0" / "home")
    assert Path(changes["HOME"] or "").is_dir()


def test_a_user_id_without_a_name(tmp_path: Path) -> None:
    environ = {"TMPDIR": str(tmp_path)}
    assert choose(environ, machine(user=None)).changes["USER"] == f"user{os.getuid()}"
    assert "USER" not in choose({**environ, "LOGNAME": "me"}, machine(user=None)).changes
    assert "USER" not in choose(environ, machine()).changes


def test_the_rank_on_the_node() -> None:
    assert local_rank({"LOCAL_RANK": "2", "SLURM_LOCALID": "0"}) == "2"
    assert local_rank({"LOCAL_RANK": "../x"}) == "0"
