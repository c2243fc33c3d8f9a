from pathlib import Path

import pytest

from fmengine.start.plan import OFFLINE, Start, plan
from support.machines import machine


def environ(tmp_path: Path, **values: str) -> dict[str, str]:
    return {"FMENGINE_IMAGE": "cpu", "TMPDIR": str(tmp_path), "HOME": str(tmp_path), **values}


def test_nothing_happens_outside_an_image(tmp_path: Path) -> None:
    hostile = {"PYTHONPATH": "/x", "TMPDIR": str(tmp_path), "LD_PRELOAD": "/x", "FMENGINE_SITE": "/none"}
    assert plan(hostile, ["train", "/none/x/y.yaml"], machine()) == Start(changes={})
    assert [*tmp_path.iterdir()] == []


def test_the_hub_is_off(tmp_path: Path) -> None:
    changes = plan(environ(tmp_path), ["train"], machine()).changes
    assert {changes[name] for name in OFFLINE} == {"1"}


@pytest.mark.parametrize("name", OFFLINE)
def test_the_user_may_want_the_hub(tmp_path: Path, name: str) -> None:
    assert not set(OFFLINE).intersection(plan(environ(tmp_path, **{name: "0"}), ["train"], machine()).changes)


def test_what_was_cut_is_one_line(tmp_path: Path) -> None:
    found = plan(environ(tmp_path, PYTHONPATH="/a", CONDA_PREFIX="/b"), ["env"], machine())
    assert found.lines == ("left out, as it is the host's: PYTHONPATH=/a; CONDA_PREFIX=/b",)
    assert plan(environ(tmp_path), ["env"], machine()).lines == ()


def test_a_second_start_changes_nothing(tmp_path: Path) -> None:
    """What was started again, and a worker, would else start again for ever."""
    values = environ(tmp_path, PYTHONPATH="/a", LD_LIBRARY_PATH=f"{tmp_path}:", LD_PRELOAD=str(tmp_path))
    first = plan(values, ["env"], machine(ignores_environment=False))
    assert first.restart
    after = {**values, **first.changes}
    second = plan({name: value for name, value in after.items() if value is not None}, ["env"], machine())
    assert (second.changes, second.lines, second.restart) == ({}, (), False)


def test_only_training_needs_a_gpu(tmp_path: Path) -> None:
    values = environ(tmp_path, FMENGINE_IMAGE="cuda13")
    assert "no NVIDIA GPU is visible" in plan(values, ["train"], machine()).problems[0]
    for command in ("prepare", "validate", "export", "doctor"):
        assert plan(values, [command], machine()).problems == ()


def test_a_users_packages(tmp_path: Path) -> None:
    site = tmp_path / "site"
    site.mkdir()
    assert plan(environ(tmp_path, FMENGINE_SITE=str(site)), ["env"], machine()).packages == site
    wrong = plan(environ(tmp_path, FMENGINE_SITE="/none"), ["env"], machine())
    assert (wrong.packages, len(wrong.problems)) == (None, 1)
    assert plan(environ(tmp_path, FMENGINE_SITE=""), ["env"], machine()).problems == ()


def test_every_problem_is_said(tmp_path: Path) -> None:
    found = plan(
        environ(tmp_path, FMENGINE_SITE="/none"),
        ["train", "/none/config.yaml", "--workers", "2"],
        machine(shared_memory=64 << 20),
    )
    assert [line.split()[0] for line in found.problems] == ["FMENGINE_SITE=/none:", "/none/config.yaml", "/dev/shm"]
