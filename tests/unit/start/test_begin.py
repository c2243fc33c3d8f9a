import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fmengine.errors import UserError
from fmengine.start import begin
from fmengine.start.plan import Start


def fmengine(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "fmengine", *arguments]
    values = {"FMENGINE_IMAGE": "cpu", "PATH": os.environ["PATH"], **environ}
    return subprocess.run(command, capture_output=True, text=True, env=values, check=False)


def test_a_hostile_host(tmp_path: Path) -> None:
    """The real command, with a broken package first on Python's path, no HOME and no TMPDIR."""
    evil, temporary = tmp_path / "evil", tmp_path / "tmp"
    evil.mkdir()
    (evil / "pydantic.py").write_text("raise SystemExit('the host was imported')")
    hostile = {"PYTHONPATH": str(evil), "CONDA_PREFIX": "/conda", "LD_PRELOAD": "/none/evil.so"}
    temporary.mkdir()
    done = fmengine("schema", TMPDIR=str(temporary), **hostile)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("{")
    said = [line for line in done.stderr.splitlines() if line.startswith("fmengine:")]  # ld.so has its own words
    assert said == [
        f"fmengine: left out, as it is the host's: PYTHONPATH={evil}; CONDA_PREFIX=/conda; LD_PRELOAD=/none/evil.so"
    ]
    assert [*temporary.iterdir()] == []  # the caches of a process that is in no job end with it


def test_outside_an_image_nothing_is_cut(tmp_path: Path) -> None:
    (tmp_path / "pydantic.py").write_text("raise SystemExit('the user was imported')")
    done = subprocess.run(
        [sys.executable, "-m", "fmengine", "schema"],
        capture_output=True,
        text=True,
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(tmp_path)},
        check=False,
    )
    assert "the user was imported" in done.stderr


def test_a_path_that_is_not_bound() -> None:
    done = fmengine("validate", "/lustre-none/me/config.yaml")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("fmengine: error: /lustre-none/me/config.yaml is not in the container")
    assert len(done.stderr.splitlines()) == 1


def planned(monkeypatch: pytest.MonkeyPatch, **values: Any) -> list[Any]:
    """Put a plan in place, and catch what starts Python again."""
    calls: list[Any] = []
    monkeypatch.setattr(begin, "plan", lambda environ, arguments, machine: Start(**{"changes": {}, **values}))
    monkeypatch.setattr(begin.os, "execve", lambda *call: calls.append(call))
    return calls


def test_the_environment_is_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = planned(monkeypatch, changes={"A": "1", "B": None, "C": None})
    environ = {"A": "0", "B": "2"}
    begin.begin(["env"], environ)
    assert (environ, calls) == ({"A": "1"}, [])


def test_python_starts_again_with_the_same_words(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = planned(monkeypatch, changes={"A": None}, restart=True)
    begin.begin(["train", "a b", "--set", "x='y'"], {"A": "1", "B": "2"})
    arguments = [sys.executable, "-I", "-m", "fmengine", "train", "a b", "--set", "x='y'"]
    assert calls == [(sys.executable, arguments, {"B": "2"})]


@pytest.mark.parametrize(
    ("environ", "speaks"),
    [({}, True), ({"RANK": "0"}, True), ({"RANK": "1"}, False), ({"SLURM_PROCID": "3"}, False)],
)
def test_one_rank_speaks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], environ: dict[str, str], speaks: bool
) -> None:
    planned(monkeypatch, lines=("x",))
    begin.begin(["env"], environ)
    assert capsys.readouterr().err == ("fmengine: x\n" if speaks else "")


def test_problems_end_the_command_and_not_the_doctor(monkeypatch: pytest.MonkeyPatch) -> None:
    planned(monkeypatch, problems=("a", "b"))
    with pytest.raises(UserError) as error:
        begin.begin(["train"], {"RANK": "1"})
    assert error.value.problems == ("a", "b")
    begin.begin(["doctor"], {})
    begin.begin(["train", "--help"], {})


def test_a_users_packages_come_last(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    planned(monkeypatch, packages=tmp_path)
    monkeypatch.setattr(sys, "path", ["first"])
    begin.begin(["env"], {})
    assert sys.path == ["first", str(tmp_path)]


def test_only_the_process_itself_removes_its_folder(tmp_path: Path) -> None:
    folder = tmp_path / "x"
    folder.mkdir()
    begin._remove(folder, os.getpid() + 1)
    assert folder.exists()
    begin._remove(folder, os.getpid())
    assert not folder.exists()
