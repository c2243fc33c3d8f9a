"""Text files as blocks of whole lines: .jsonl, .jsonl.gz, .jsonl.zst and .txt, in bounded memory.

Nothing is parsed here, so that one process feeds many: a block is about a mebibyte of raw lines (or one
longer line), and a whole .txt file. What cannot be read, like the tail of a truncated .gz, becomes a block with
`damage`, so that it is reported in its place among the bad rows.
"""

import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import zstandard

from fmengine.errors import UserError

BLOCK_BYTES = 1 << 20
READ_BYTES = 1 << 16
"""Compressed bytes read at once; small, because they may grow a thousandfold."""
ZSTD_MAX_WINDOW = 1 << 31
"""What `zstd --long=31` writes; the default limit refuses it."""


@dataclass(frozen=True)
class Block:
    """Consecutive lines of one file.

    Attributes:
        file: where they come from.
        first_line: number of the first line, from 1.
        data: the lines with their newlines.
        is_document: the whole is one document's text (.txt), not JSON lines.
        damage: why the file could not be read on; then the last, unfinished line is bad.
        position: bytes of all files (compressed where they are) that were read so far.
    """

    file: Path
    first_line: int
    data: bytes
    is_document: bool
    damage: str | None
    position: int


def check_inputs(inputs: Sequence[Path]) -> int:
    """Look at every input before work begins; gives their size in bytes.

    Raises:
        UserError: one or more are missing, no files, of an unknown kind, or not readable; all are named.
    """
    problems, total = [], 0
    if not inputs:
        problems.append("no input files; name .jsonl, .jsonl.gz, .jsonl.zst or .txt files")
    for file in inputs:
        try:
            if file.is_dir():
                problems.append(f"{file}: a folder; name the files in it")
            elif not file.name.endswith((".jsonl", ".jsonl.gz", ".jsonl.zst", ".txt")):
                problems.append(f"{file}: unknown kind of file; .jsonl, .jsonl.gz, .jsonl.zst and .txt are read")
            else:
                with file.open("rb"):
                    total += file.stat().st_size
        except OSError as error:
            problems.append(f"{file}: cannot be read: {error.strerror}")
    if problems:
        raise UserError(problems)
    return total


def read_blocks(files: Iterable[Path]) -> Iterator[Block]:
    """The blocks of the files, in order."""
    before = 0
    for file in files:
        with file.open("rb") as stream:
            line = 1
            is_document = file.suffix == ".txt"
            parts = [(stream.read(), None)] if is_document else _whole_lines(_pieces(file, stream))
            for data, damage in parts:
                yield Block(file, line, data, is_document, damage, before + stream.tell())
                line += data.count(b"\n")
            before += stream.tell()


def _whole_lines(pieces: Iterator[bytes]) -> Iterator[tuple[bytes, str | None]]:
    """Join pieces to blocks that end at a newline; the last one may not, and says why if the file is damaged."""
    pending: list[bytes] = []
    size, damage = 0, None
    try:
        for piece in pieces:
            pending.append(piece)
            size += len(piece)
            if size >= BLOCK_BYTES and (cut := piece.rfind(b"\n") + 1):
                pending[-1] = piece[:cut]
                yield b"".join(pending), None
                pending, size = [piece[cut:]], len(piece) - cut
    except (EOFError, zlib.error, zstandard.ZstdError, OSError) as error:
        damage = f"the file cannot be read on: {error}"
    if size or damage:
        yield b"".join(pending), damage


def _pieces(file: Path, stream: BinaryIO) -> Iterator[bytes]:
    if file.suffix == ".gz":
        return _decompressed(stream, lambda: zlib.decompressobj(wbits=16 + zlib.MAX_WBITS), "truncated gzip data")
    if file.suffix == ".zst":
        new = zstandard.ZstdDecompressor(max_window_size=ZSTD_MAX_WINDOW).decompressobj
        return _decompressed(stream, new, "truncated zstd data")
    return iter(lambda: stream.read(BLOCK_BYTES), b"")


def _decompressed(stream: BinaryIO, new: Callable[[], Any], truncated: str) -> Iterator[bytes]:
    """The contents of concatenated gzip members or zstd frames.

    Not the libraries' own file objects: zstandard's takes a truncated file for a whole one, and gzip's
    loses what it had before the damage.
    """
    decoder = None
    while raw := stream.read(READ_BYTES):
        while raw:
            if decoder is None or decoder.eof:
                raw = raw.lstrip(b"\0")  # gzip allows zeros behind a member
                if not raw:
                    break
                decoder = new()
            yield decoder.decompress(raw)
            raw = decoder.unused_data
    if decoder is not None and not decoder.eof:
        raise EOFError(truncated)
