import gzip
import struct
from pathlib import Path

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from fmengine.data import blocks
from fmengine.data.blocks import Block, _whole_lines, check_inputs, read_blocks
from fmengine.errors import UserError

LINES = b"".join(b"line %d\n" % i for i in range(1000))


def zstd(data: bytes) -> bytes:
    """A frame of small blocks; by itself the library makes blocks of 128 KiB."""
    compressor = zstandard.ZstdCompressor().compressobj()
    parts = [
        compressor.compress(data[start : start + 200]) + compressor.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK)
        for start in range(0, len(data), 200)
    ]
    return b"".join(parts) + compressor.flush()


def text(parts: list[Block]) -> bytes:
    return b"".join(part.data for part in parts)


@given(pieces=st.lists(st.binary(max_size=5).map(lambda piece: piece.replace(b"\0", b"\n")), max_size=30))
def test_lines_are_never_split(pieces: list[bytes]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "BLOCK_BYTES", 4)
        parts = [data for data, _ in _whole_lines(iter(pieces))]
    assert b"".join(parts) == b"".join(pieces)
    assert all(part.endswith(b"\n") for part in parts[:-1])


CONTAINERS = {
    "a.jsonl": LINES,
    "a.jsonl.gz": gzip.compress(LINES),
    "members.jsonl.gz": gzip.compress(LINES[:100]) + gzip.compress(LINES[100:]) + bytes(17),
    "a.jsonl.zst": zstd(LINES),
    "frames.jsonl.zst": zstd(LINES[:100]) + struct.pack("<II", 0x184D2A50, 4) + b"skip" + zstd(LINES[100:]),
}


@pytest.mark.parametrize("name", CONTAINERS)
def test_every_kind_of_file_is_read_in_blocks(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 100)
    monkeypatch.setattr(blocks, "READ_BYTES", 64)
    file = tmp_path / name
    file.write_bytes(CONTAINERS[name])
    parts = list(read_blocks([file]))
    assert text(parts) == LINES
    assert len(parts) > 10
    assert {part.damage for part in parts} == {None}
    assert parts[-1].position == file.stat().st_size
    for part in parts:
        assert part.data.startswith(b"line %d\n" % (part.first_line - 1))


def test_zstd_of_the_longest_window_is_read(tmp_path: Path) -> None:
    parameters = zstandard.ZstdCompressionParameters(window_log=28, compression_level=1)
    compressor = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    (tmp_path / "a.jsonl.zst").write_bytes(compressor.compress(LINES) + compressor.flush())
    assert text(list(read_blocks([tmp_path / "a.jsonl.zst"]))) == LINES


def test_a_txt_is_one_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 100)
    (tmp_path / "a.txt").write_bytes(LINES)
    (part,) = read_blocks([tmp_path / "a.txt"])
    assert (part.data, part.is_document) == (LINES, True)


def test_positions_go_on_over_files(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / f"{name}.txt").write_bytes(LINES)
    assert [part.position for part in read_blocks([tmp_path / "a.txt", tmp_path / "b.txt"])] == [
        len(LINES),
        2 * len(LINES),
    ]


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst"])
def test_a_truncated_file_gives_what_came_before_and_says_so(tmp_path: Path, name: str) -> None:
    file = tmp_path / name
    file.write_bytes(CONTAINERS[name][:-5])
    parts = list(read_blocks([file]))
    assert "truncated" in (parts[-1].damage or "")
    assert LINES.startswith(text(parts))
    assert len(text(parts)) > 8000


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst"])
def test_other_data_under_such_a_name_is_damage(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(LINES)
    (part,) = read_blocks([tmp_path / name])
    assert (part.data, part.first_line) == (b"", 1)
    assert part.damage


def test_an_empty_file_holds_no_block(tmp_path: Path) -> None:
    for name in ("a.jsonl", "a.jsonl.gz", "a.jsonl.zst"):
        (tmp_path / name).touch()
        assert list(read_blocks([tmp_path / name])) == []


def test_all_bad_inputs_are_named_at_once(tmp_path: Path) -> None:
    (tmp_path / "good.jsonl").write_bytes(b"123")
    (tmp_path / "odd.csv").touch()
    (tmp_path / "folder.jsonl").mkdir()
    with pytest.raises(UserError) as caught:
        check_inputs([tmp_path / name for name in ("good.jsonl", "odd.csv", "folder.jsonl", "none.jsonl")])
    assert [problem.split(": ", 1)[1].split(";")[0] for problem in caught.value.problems] == [
        "unknown kind of file",
        "a folder",
        "cannot be read: No such file or directory",
    ]
    assert check_inputs([tmp_path / "good.jsonl"]) == 3
    with pytest.raises(UserError, match="no input"):
        check_inputs([])
