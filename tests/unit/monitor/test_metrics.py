"""metrics.jsonl holds every step once, after any kill, and never ends a run."""

import json
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fmengine.errors import UserError
from fmengine.monitor.metrics import MetricsFile, cut


def steps_in(path: Path) -> list[int]:
    return [json.loads(row)["step"] for row in path.read_text().splitlines()]


def rows(*steps: int) -> list[dict[str, object]]:
    return [{"kind": "train", "step": step, "loss": 1.0} for step in steps]


def write(path: Path, resumed: int, *steps: int) -> None:
    file = MetricsFile(path, resumed)
    file.write(rows(*steps))
    file.close()


def test_rows_beyond_the_resumed_step_are_cut(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, 0, 1, 2, 3, 4)
    write(path, 2, 3, 4, 5)
    assert steps_in(path) == [1, 2, 3, 4, 5]


def test_starting_over_keeps_nothing(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, 0, 1, 2)
    write(path, 0, 1)
    assert steps_in(path) == [1]


@pytest.mark.parametrize("torn", [b'{"kind": "train", "st', b'{"step": 3}', b"\xff\xfe", b"\x00" * 64, b"3\n"])
def test_a_torn_last_line_is_removed(tmp_path: Path, torn: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, 0, 1, 2)
    path.write_bytes(path.read_bytes() + torn)
    write(path, 2, 3)
    assert steps_in(path) == [1, 2, 3]


def test_cutting_leaves_no_other_file(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, 0, 1, 2)
    cut(path, 1)
    assert [entry.name for entry in tmp_path.iterdir()] == ["metrics.jsonl"]
    assert steps_in(path) == [1]


def test_a_number_that_is_not_finite_is_null(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path, 0)
    file.write([{"step": 1, "loss": float("nan"), "grad_norm": float("inf")}])
    file.close()
    row = json.loads(path.read_text())
    assert row["loss"] is None
    assert row["grad_norm"] is None


def test_a_folder_that_is_not_there_is_the_users_mistake(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"run\.dir: cannot write .*metrics\.jsonl"):
        MetricsFile(tmp_path / "none" / "metrics.jsonl", 0)


@contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    """No file grows beyond this many bytes: a write stops short, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_loses_rows_but_neither_the_run_nor_the_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path, 0)
    file.write(rows(1, 2, 3))
    with file_size_limit(path.stat().st_size + 100):
        file.write(rows(4, 5, 6, 7))
    file.write(rows(8))
    file.close()
    assert steps_in(path) == [1, 2, 3, 8]
    assert "4 rows are lost" in caplog.text
