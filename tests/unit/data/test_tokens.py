import contextlib
import struct
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fmengine.data.tokens import HEADER, TokenReader, TokenWriter, bin_path, idx_path, token_dtype
from fmengine.errors import UserError
from support.data import write_documents

DOCUMENTS = [[1, 2, 3], [4], [], [5, 6], []]


@settings(max_examples=40)
@given(documents=st.lists(st.lists(st.integers(0, 999), max_size=6), min_size=1, max_size=12))
def test_what_is_written_is_read(documents: list[list[int]]) -> None:
    flat = [token for document in documents for token in document]
    if not flat:
        return
    with tempfile.TemporaryDirectory() as folder:
        reader = write_documents(Path(folder) / "d.v1", documents)
        assert reader.tokens(0, reader.num_tokens).tolist() == flat
        assert reader.num_documents == len(documents)
        bounds = [reader.document_start(i) for i in range(len(documents) + 1)]
        assert bounds == np.cumsum([0, *map(len, documents)]).tolist()
        for token in range(len(flat)):
            document = reader.document_at(token)
            assert bounds[document] <= token < bounds[document + 1]
        for start in range(len(flat)):
            for stop in range(start + 1, len(flat) + 1):
                inside = sorted({bound for bound in bounds if start < bound < stop})
                assert reader.starts_between(start, stop).tolist() == inside


def test_tokens_are_views_of_the_map(tmp_path: Path) -> None:
    reader = write_documents(tmp_path / "d", [[1, 2, 3], [4, 5]])
    assert np.shares_memory(reader.tokens(1, 3), reader.tokens(2, 5))


def test_the_smallest_dtype_that_holds_the_vocabulary() -> None:
    assert token_dtype(65536) == np.uint16
    assert token_dtype(65537) == np.int32


def test_large_ids_survive(tmp_path: Path) -> None:
    assert write_documents(tmp_path / "small", [[0, 65535]], 65536).tokens(0, 2).tolist() == [0, 65535]
    assert write_documents(tmp_path / "large", [[0, 131071]], 131072).tokens(0, 2).tolist() == [0, 131071]


def test_opening_does_not_read_the_index(tmp_path: Path) -> None:
    # Sparse files of a billion documents: reading the index would take 20 GB.
    count = 10**9
    pointers = HEADER.size + 4 * count
    with idx_path(tmp_path / "d").open("wb") as index:
        index.write(HEADER.pack(b"MMIDIDX\0\0", 1, 8, count, count + 1))
        index.seek(pointers - 4)
        index.write(struct.pack("<i", 2))
        index.seek(pointers + 8 * (count - 1))
        index.write(struct.pack("<q", 2 * (count - 1) * 2))
        index.seek(pointers + 8 * count + 8 * count)
        index.write(struct.pack("<q", count))
    with bin_path(tmp_path / "d").open("wb") as data:
        data.truncate(4 * count)
    reader = TokenReader(tmp_path / "d")
    assert reader.num_documents == count
    assert reader.num_tokens == 2 * count


def test_the_writer_leaves_nothing_when_it_fails(tmp_path: Path) -> None:
    with contextlib.suppress(ValueError), TokenWriter(tmp_path / "out" / "d", 10) as writer:
        writer.append(np.array([1]), np.array([1]))
        writer.append(np.array([1]), np.array([2]))
    assert list((tmp_path / "out").glob("*")) == []


def test_the_writer_shows_only_two_whole_files(tmp_path: Path) -> None:
    with TokenWriter(tmp_path / "d", 10) as writer:
        writer.append(np.array([1, 2]), np.array([1, 1]))
        assert not bin_path(tmp_path / "d").exists()
        writer.finish()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["d.bin", "d.idx"]


def test_the_index_is_written_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_documents(tmp_path / "whole", DOCUMENTS)
    monkeypatch.setattr("fmengine.data.tokens.CHUNK", 2)
    write_documents(tmp_path / "pieces", DOCUMENTS)
    assert idx_path(tmp_path / "pieces").read_bytes() == idx_path(tmp_path / "whole").read_bytes()


def test_lengths_must_sum_to_the_tokens(tmp_path: Path) -> None:
    with TokenWriter(tmp_path / "d", 10) as writer, pytest.raises(ValueError, match="lengths"):
        writer.append(np.array([1, 2]), np.array([1]))


def test_existing_output_is_kept(tmp_path: Path) -> None:
    write_documents(tmp_path / "d", [[1]])
    with pytest.raises(UserError, match=r"d\.bin: exists already"):
        TokenWriter(tmp_path / "d", 10)
    assert TokenReader(tmp_path / "d").num_tokens == 1


def test_two_writers_do_not_mix(tmp_path: Path) -> None:
    with TokenWriter(tmp_path / "d", 10) as first:
        with pytest.raises(UserError, match=r"d\.bin\.partial: another run"):
            TokenWriter(tmp_path / "d", 10)
        first.append(np.array([1]), np.array([1]))
        first.finish()
    assert TokenReader(tmp_path / "d").num_tokens == 1


def test_overwrite_replaces_finished_and_stopped_output(tmp_path: Path) -> None:
    write_documents(tmp_path / "d", [[1]])
    (tmp_path / "d.bin.partial").write_bytes(b"left over")
    assert write_documents(tmp_path / "d", [[2, 3]]).tokens(0, 2).tolist() == [2, 3]


def rewrite(path: Path, place: int, data: bytes) -> None:
    whole = bytearray(path.read_bytes())
    whole[place : place + len(data)] = data
    path.write_bytes(whole)


BROKEN = {
    "bin missing": (lambda p: bin_path(p).unlink(), r"d\.bin: no such file"),
    "idx missing": (lambda p: idx_path(p).unlink(), r"d\.idx: no such file"),
    "bin truncated": (lambda p: bin_path(p).write_bytes(bin_path(p).read_bytes()[:-2]), r"d\.bin: truncated: 10 bytes"),
    "bin too long": (lambda p: bin_path(p).write_bytes(bin_path(p).read_bytes() + b"xx"), r"d\.bin: not the file"),
    "bin empty": (lambda p: bin_path(p).write_bytes(b""), r"the data set is empty"),
    "idx empty": (lambda p: idx_path(p).write_bytes(b""), r"d\.idx: not an index"),
    "idx cut in the header": (
        lambda p: idx_path(p).write_bytes(idx_path(p).read_bytes()[:20]),
        r"d\.idx: not an index",
    ),
    "idx cut": (lambda p: idx_path(p).write_bytes(idx_path(p).read_bytes()[:-8]), r"d\.idx: truncated"),
    "idx too long": (lambda p: idx_path(p).write_bytes(idx_path(p).read_bytes() + b"x"), r"d\.idx: inconsistent"),
    "magic": (lambda p: rewrite(idx_path(p), 0, b"X"), r"d\.idx: not an index"),
    "version": (lambda p: rewrite(idx_path(p), 9, b"\2"), r"d\.idx: version 2"),
    "float dtype": (lambda p: rewrite(idx_path(p), 17, b"\7"), r"d\.idx: dtype code 7"),
    "no documents": (lambda p: idx_path(p).write_bytes(HEADER.pack(b"MMIDIDX\0\0", 1, 8, 0, 1) + bytes(8)), "is empty"),
    "last bound": (
        lambda p: rewrite(idx_path(p), idx_path(p).stat().st_size - 8, b"\4"),
        r"d\.idx: its document bounds",
    ),
    "last length": (lambda p: rewrite(idx_path(p), HEADER.size + 16, b"\1"), r"d\.bin: truncated"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_files_are_named_in_one_line(tmp_path: Path, case: str) -> None:
    write_documents(tmp_path / "d", DOCUMENTS)
    damage, message = BROKEN[case]
    damage(tmp_path / "d")
    with pytest.raises(UserError, match=message) as caught:
        TokenReader(tmp_path / "d")
    assert "\n" not in str(caught.value)
