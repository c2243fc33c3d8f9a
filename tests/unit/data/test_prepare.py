import errno
import gzip
import json
import multiprocessing
import os
import signal
import tracemalloc
from pathlib import Path

import pytest
import zstandard
from tokenizers import Tokenizer

from fmengine.data import blocks, tokens
from fmengine.data.prepare import prepare
from fmengine.data.tokenizer import tokenizer_hash
from fmengine.data.tokens import TokenReader
from fmengine.errors import UserError

TEXTS = ["the quick fox", "naïve café 東京", "", "over\nthe lazy dog", " "]


def rows(texts: list[str]) -> bytes:
    return b"".join(json.dumps({"id": i, "text": text}).encode() + b"\n" for i, text in enumerate(texts))


def documents(prefix: Path, tokenizer: Tokenizer) -> list[str]:
    """The texts of a data set, each of which must end with the end token."""
    reader = TokenReader(prefix)
    end = tokenizer.token_to_id("<|endoftext|>")
    texts = []
    for number in range(reader.num_documents):
        ids = reader.tokens(reader.document_start(number), reader.document_start(number + 1)).tolist()
        assert ids.pop() == end
        assert end not in ids
        texts.append(tokenizer.decode(ids))
    return texts


def test_every_kind_of_file_in_the_order_given(tmp_path: Path, tokenizer: Tokenizer, tokenizer_dir: Path) -> None:
    files = {
        "a.jsonl": rows(["one"]) + b"\n" + rows(["two"]).rstrip(),
        "b.jsonl.gz": gzip.compress(rows(["three"])),
        "c.jsonl.zst": zstandard.compress(rows(["four", ""])),
        "d.txt": b"\xef\xbb\xbffive\nand six\n",
    }
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    inputs = [tmp_path / name for name in files]
    manifest = prepare(inputs, tokenizer_dir, tmp_path / "out" / "d.v1", command="fmengine prepare")
    texts = ["one", "two", "three", "four", "five\nand six\n"]
    assert documents(tmp_path / "out" / "d.v1", tokenizer) == texts
    assert (manifest.documents, manifest.empty_rows, manifest.skipped_rows) == (5, 1, 0)
    assert manifest.text_bytes == len("".join(texts).encode())
    assert manifest.tokens == TokenReader(tmp_path / "out" / "d.v1").num_tokens
    assert manifest.tokenizer_sha256 == tokenizer_hash(tokenizer_dir)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["d.v1.bin", "d.v1.idx", "d.v1.json"]
    written = json.loads((tmp_path / "out" / "d.v1.json").read_text())
    assert written["inputs"] == [str(file) for file in inputs]
    assert written["end_of_document"] == "<|endoftext|>"
    assert written["command"] == "fmengine prepare"


def test_any_number_of_workers_writes_the_same_bytes(
    tmp_path: Path, tokenizer_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 500)
    (tmp_path / "a.jsonl").write_bytes(rows(TEXTS * 100) + b"not json\n" + rows(TEXTS * 100))
    (tmp_path / "b.txt").write_text("a whole document")
    inputs = [tmp_path / "a.jsonl", tmp_path / "b.txt"]
    bad: dict[int, list[str]] = {1: [], 2: []}
    for workers in (1, 2):
        out = tmp_path / f"{workers}" / "d"
        prepare(inputs, tokenizer_dir, out, workers=workers, on_error="skip", on_bad_row=bad[workers].append)
    for ending in ("bin", "idx", "json"):
        assert (tmp_path / "1" / f"d.{ending}").read_bytes() == (tmp_path / "2" / f"d.{ending}").read_bytes()
    assert bad[1] == bad[2]
    assert len(bad[1]) == 1


def test_a_killed_worker_is_an_error_and_leaves_nothing(
    tmp_path: Path, tokenizer_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 50)
    (tmp_path / "a.jsonl").write_bytes(rows(TEXTS * 2000))

    def kill_one(_: object) -> None:
        for child in multiprocessing.active_children()[:1]:
            os.kill(child.pid or 0, signal.SIGKILL)

    with pytest.raises(UserError, match="worker process of prepare was killed"):
        prepare([tmp_path / "a.jsonl"], tokenizer_dir, tmp_path / "out" / "d", workers=2, on_progress=kill_one)
    assert list((tmp_path / "out").glob("*")) == []


GOOD = b'{"text": "good"}\n'
BAD = {
    "malformed": (b'{"text": "x"\n', "a.jsonl:2: malformed JSON: Expecting ',' delimiter at column 13"),
    "not an object": (b'["text"]\n', "a.jsonl:2: a JSON object was expected, this is a list"),
    "no text": (b'{"txt": "x"}\n', "a.jsonl:2: no key 'text'; --text-key"),
    "text is null": (b'{"text": null}\n', "a.jsonl:2: 'text' is null, not a string"),
    "text is a number": (b'{"text": 3}\n', "a.jsonl:2: 'text' is a number, not a string"),
    "not UTF-8": (b'{"text": "\xff"}\n', "a.jsonl:2: not UTF-8: byte 0xff"),
    "half a surrogate": (rb'{"text": "\ud800"}' + b"\n", "a.jsonl:2: the text holds half of a surrogate pair"),
    "too deep": (b"[" * 100_000 + b"\n", "a.jsonl:2: JSON nested too deeply"),
    "huge number": (b'{"text": "x", "n": ' + b"1" * 5000 + b"}\n", "a.jsonl:2: Exceeds the limit"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_row_stops_by_file_and_line(tmp_path: Path, tokenizer_dir: Path, case: str) -> None:
    row, message = BAD[case]
    (tmp_path / "a.jsonl").write_bytes(GOOD + row + GOOD)
    with pytest.raises(UserError) as caught:
        prepare([tmp_path / "a.jsonl"], tokenizer_dir, tmp_path / "out" / "d")
    assert str(caught.value).startswith(f"{tmp_path}/{message}")
    assert "\n" not in str(caught.value)
    assert list((tmp_path / "out").glob("*")) == []


@pytest.mark.parametrize("case", BAD)
def test_a_bad_row_is_left_out_when_asked(tmp_path: Path, tokenizer: Tokenizer, tokenizer_dir: Path, case: str) -> None:
    row, message = BAD[case]
    (tmp_path / "a.jsonl").write_bytes(GOOD + row + GOOD)
    shown: list[str] = []
    manifest = prepare([tmp_path / "a.jsonl"], tokenizer_dir, tmp_path / "d", on_error="skip", on_bad_row=shown.append)
    assert (manifest.documents, manifest.skipped_rows) == (2, 1)
    assert documents(tmp_path / "d", tokenizer) == ["good", "good"]
    assert [row.startswith(f"{tmp_path}/{message}") for row in shown] == [True]


def test_bad_bytes_of_a_txt_are_found_by_line(tmp_path: Path, tokenizer_dir: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"one\ntwo\nthr\xffe\n")
    with pytest.raises(UserError, match=r"a\.txt:3: not UTF-8: byte 0xff"):
        prepare([tmp_path / "a.txt"], tokenizer_dir, tmp_path / "d")


@pytest.mark.parametrize("kind", ["gz", "zst"])
def test_the_place_where_a_file_is_cut_is_named(
    tmp_path: Path, tokenizer: Tokenizer, tokenizer_dir: Path, kind
) -> None:
    whole = rows([f"{i} {os.urandom(40).hex()}" for i in range(500)])
    compress = gzip.compress if kind == "gz" else zstandard.ZstdCompressor(write_content_size=False).compress
    # Two frames or members, of which the second lacks its end.
    (tmp_path / f"a.jsonl.{kind}").write_bytes(compress(whole) + compress(GOOD * 3)[:-6])
    file = tmp_path / f"a.jsonl.{kind}"
    with pytest.raises(UserError, match=rf"a\.jsonl\.{kind}:50\d: the file cannot be read on: truncated"):
        prepare([file], tokenizer_dir, tmp_path / "d")
    manifest = prepare([file], tokenizer_dir, tmp_path / "d", on_error="skip")
    assert manifest.skipped_rows == 1
    assert documents(tmp_path / "d", tokenizer)[499].startswith("499 ")


@pytest.mark.parametrize("data", [b"", b"\n\n", b'{"text": ""}\n'])
def test_no_document_at_all_is_an_error(tmp_path: Path, tokenizer_dir: Path, data: bytes) -> None:
    (tmp_path / "a.jsonl").write_bytes(data)
    with pytest.raises(UserError, match="the input holds no document"):
        prepare([tmp_path / "a.jsonl"], tokenizer_dir, tmp_path / "out" / "d")
    assert list((tmp_path / "out").glob("*")) == []


def test_the_text_key_and_the_end_token_can_be_named(tmp_path: Path, tokenizer: Tokenizer, tokenizer_dir: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"content": "fox"}\n')
    manifest = prepare([tmp_path / "a.jsonl"], tokenizer_dir, tmp_path / "d", text_key="content", eod="x")
    assert manifest.end_of_document == "x"
    assert TokenReader(tmp_path / "d").tokens(manifest.tokens - 1, manifest.tokens) == tokenizer.token_to_id("x")


@pytest.mark.parametrize("existing", ["d.bin", "d.idx", "d.json"])
def test_existing_files_are_replaced_only_by_force(tmp_path: Path, tokenizer_dir: Path, existing: str) -> None:
    (tmp_path / "a.jsonl").write_bytes(GOOD)
    (tmp_path / existing).write_text("precious")
    with pytest.raises(UserError, match=rf"{existing}: exists already"):
        prepare([tmp_path / "a.jsonl"], tokenizer_dir, tmp_path / "d")
    assert (tmp_path / existing).read_text() == "precious"
    prepare([tmp_path / "a.jsonl"], tokenizer_dir, tmp_path / "d", force=True)
    assert TokenReader(tmp_path / "d").num_documents == 1


def test_a_folder_is_no_prefix(tmp_path: Path, tokenizer_dir: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(GOOD)
    with pytest.raises(UserError, match="a folder; --out takes the prefix"):
        prepare([tmp_path / "a.jsonl"], tokenizer_dir, tmp_path)


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path: Path, tokenizer_dir: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(GOOD)
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"file: File exists|Not a directory"):
        prepare([tmp_path / "a.jsonl"], tokenizer_dir, tmp_path / "file" / "d")


@pytest.mark.parametrize("when", ["append", "_write_index"])
def test_a_full_disk_is_an_error_and_leaves_nothing(
    tmp_path: Path, tokenizer_dir: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(f"fmengine.data.tokens.TokenWriter.{when}", full)
    (tmp_path / "a.jsonl").write_bytes(GOOD)
    with pytest.raises(UserError, match=r"d\.bin: No space left on device; nothing was kept"):
        prepare([tmp_path / "a.jsonl"], tokenizer_dir, tmp_path / "out" / "d")
    assert list((tmp_path / "out").glob("*")) == []


def test_memory_does_not_grow_with_the_documents(
    tmp_path: Path, tokenizer_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 1 << 14)
    monkeypatch.setattr(tokens, "CHUNK", 1 << 10)
    row = b'{"text": "the"}\n'
    peaks = []
    for count in (10_000, 100_000):
        (tmp_path / "a.jsonl").write_bytes(row * count)
        tracemalloc.start()
        prepare([tmp_path / "a.jsonl"], tokenizer_dir, tmp_path / f"{count}", force=True)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert TokenReader(tmp_path / "100000").num_documents == 100_000
    assert peaks[1] < peaks[0] + 200_000  # two bytes a document: even packed lengths would take four
