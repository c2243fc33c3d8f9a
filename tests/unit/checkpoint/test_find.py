"""Broken checkpoints are seen for what they are."""

import json
import logging
from pathlib import Path

import pytest

from fmengine.checkpoint.files import digest_text
from fmengine.checkpoint.find import find_newest, resolve, run_of, verify
from fmengine.errors import UserError
from support.checkpoints import save_step

STATE = "engine/state/rank-0.pt"


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[500] ^= 1
    path.write_bytes(data)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


DAMAGE = {
    "truncated": (lambda path: truncate(path / STATE), "999 bytes instead of 1000"),
    "missing file": (lambda path: (path / STATE).unlink(), "missing"),
    "no marker": (lambda path: (path / "COMPLETE").unlink(), "the save did not end"),
    "no manifest": (lambda path: (path / "manifest.json").unlink(), "the save did not end"),
    "marker of another": (lambda path: (path / "COMPLETE").write_text("0" * 64), "not what COMPLETE vouches for"),
    "binary marker": (lambda path: (path / "COMPLETE").write_bytes(b"\xff\xfe"), "can't decode"),
    "manifest changed": (
        lambda path: (path / "manifest.json").write_text((path / "manifest.json").read_text().replace("1600", "1700")),
        "not what COMPLETE vouches for",
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_the_one_before_is_found_and_the_log_says_why(run: Path, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    older, newer = save_step(run, 99), save_step(run, 100)
    assert find_newest(run) == newer
    harm, reason = DAMAGE[damage]
    harm(newer)
    with caplog.at_level(logging.WARNING):
        assert find_newest(run) == older
    assert reason in caplog.text
    with pytest.raises(UserError, match=reason):
        verify(newer, full=False)


def test_a_flipped_byte_is_seen_by_the_full_check(run: Path) -> None:
    path = save_step(run, 100)
    flip(path / STATE)
    verify(path, full=False)
    with pytest.raises(UserError, match=r"rank-0\.pt: not what was written"):
        verify(path, full=True)


def test_a_wrong_digest_in_a_vouched_manifest(run: Path) -> None:
    path = save_step(run, 100)
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["files"][STATE]["digest"] = "0" * 64
    text = json.dumps(manifest)
    (path / "manifest.json").write_text(text)
    (path / "COMPLETE").write_text(digest_text(text))
    with pytest.raises(UserError, match="not what was written"):
        verify(path)


def test_newer_format_is_not_passed_over(run: Path) -> None:
    save_step(run, 99)
    path = save_step(run, 100)
    manifest = json.loads((path / "manifest.json").read_text())
    manifest |= {"format_version": 2, "something": "new", "versions": {"fmengine": "9.0"}}
    text = json.dumps(manifest)
    (path / "manifest.json").write_text(text)
    (path / "COMPLETE").write_text(digest_text(text))
    with pytest.raises(UserError, match=r"format_version 2, but fmengine .* reads 1; .*9\.0"):
        find_newest(run)


def test_latest_is_only_a_hint(run: Path) -> None:
    path = save_step(run, 100)
    (run / "checkpoints" / "latest").write_text("step-00000007\n")
    assert find_newest(run) == path
    (run / "checkpoints" / "latest").unlink()
    assert find_newest(run) == path


def test_nothing_there(run: Path) -> None:
    assert find_newest(run) is None
    (run / "checkpoints" / ".staging-step-00000001").mkdir(parents=True)
    (run / "checkpoints" / "step-1").mkdir()
    assert find_newest(run) is None
    with pytest.raises(UserError, match="no whole checkpoint"):
        resolve(run)
    with pytest.raises(UserError, match="no such folder"):
        resolve(run / "elsewhere")


def test_resolve_takes_a_run_or_a_checkpoint(run: Path) -> None:
    older, newer = save_step(run, 99), save_step(run, 100)
    assert resolve(run) == newer
    assert resolve(older) == older
    assert run_of(older) == run
