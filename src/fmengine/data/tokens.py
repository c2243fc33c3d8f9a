"""Token data on disk: Megatron's .bin/.idx pair, read through memory maps and written atomically.

PREFIX.bin holds the token ids, one after another. PREFIX.idx (all little-endian) holds the magic
``MMIDIDX\\0\\0``, version 1 (uint64), the code of the ids' dtype (uint8), the number of sequences n
and of document bounds d (uint64 each), then n lengths in tokens (int32), n offsets into .bin in
bytes (int64) and d bounds in sequences (int64, first 0, last n); a multimodal file has n modes
(int8) behind them, which are not read. A document is one sequence in our files and may be several
(sentences) in others. Source of the format: megatron-core, ``megatron/core/datasets/indexed_dataset.py``.
"""

import contextlib
import os
import struct
from bisect import bisect_right
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from fmengine.errors import UserError

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
DTYPES: dict[int, np.dtype[Any]] = {
    1: np.dtype("<u1"),
    2: np.dtype("<i1"),
    3: np.dtype("<i2"),
    4: np.dtype("<i4"),
    5: np.dtype("<i8"),
    8: np.dtype("<u2"),
}
"""Megatron's dtype codes that can be token ids (6 and 7 are floating point)."""
CHUNK = 1 << 20
"""Entries of the index that are held in memory at once while it is written."""


def bin_path(prefix: Path) -> Path:
    """PREFIX.bin; a dot in the prefix is part of its name."""
    return prefix.with_name(prefix.name + ".bin")


def idx_path(prefix: Path) -> Path:
    """PREFIX.idx; a dot in the prefix is part of its name."""
    return prefix.with_name(prefix.name + ".idx")


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """The smallest dtype that Megatron writes and that holds ids below `vocab_size`: uint16 or int32."""
    return DTYPES[8] if vocab_size <= 1 << 16 else DTYPES[4]


class TokenReader:
    """One .bin/.idx pair. Opening reads the header and the two ends of the index, whatever its size.

    Attributes:
        prefix: path without .bin or .idx.
        dtype: how ids lie in the file.
        num_documents: documents, empty ones included.
        num_tokens: tokens in all documents.

    Raises:
        UserError: a file is missing, is no such file, is truncated, does not fit its partner, or is empty.
    """

    def __init__(self, prefix: Path) -> None:
        self.prefix = prefix
        index_file = idx_path(prefix)
        for file in (index_file, bin_path(prefix)):
            if not file.is_file():
                raise UserError(f"{file}: no such file; give the common prefix of a .bin/.idx pair, without an ending")
        self.dtype, sequences, bounds = _read_header(index_file)
        if sequences == 0 or bin_path(prefix).stat().st_size == 0:
            raise UserError(f"{index_file}: the data set is empty; prepare it from files that hold text")
        self.num_documents = bounds - 1
        # asarray: a plain view of the map, whose elements are read five times faster than the subclass's.
        self._index: NDArray[np.uint8] = np.asarray(np.memmap(index_file, mode="r"))
        pointers = HEADER.size + 4 * sequences
        self._pointers: NDArray[np.int64] = self._index[pointers : pointers + 8 * sequences].view("<i8")
        documents = pointers + 8 * sequences
        self._documents: NDArray[np.int64] = self._index[documents : documents + 8 * bounds].view("<i8")
        self.num_tokens = self._check(index_file, sequences)
        data = np.memmap(bin_path(prefix), dtype=self.dtype, mode="r", shape=(self.num_tokens,))
        self._tokens: NDArray[Any] = np.asarray(data)

    def _check(self, index_file: Path, sequences: int) -> int:
        """Compare both ends of the index with each other and with the size of .bin; gives the number of tokens."""
        if self._documents[0] != 0 or self._documents[-1] != sequences:
            raise UserError(f"{index_file}: its document bounds do not span its {sequences} sequences; prepare it anew")
        lengths = self._index[HEADER.size : HEADER.size + 4 * sequences].view("<i4")
        expected = int(self._pointers[-1]) + int(lengths[-1]) * self.dtype.itemsize
        data_file = bin_path(self.prefix)
        size = data_file.stat().st_size
        if size != expected or self._pointers[0] != 0 or expected % self.dtype.itemsize:
            state = "truncated" if size < expected else "not the file that its index describes"
            raise UserError(
                f"{data_file}: {state}: {size} bytes where {index_file.name} says {expected}; prepare it anew"
            )
        return size // self.dtype.itemsize

    def tokens(self, start: int, stop: int) -> NDArray[Any]:
        """Ids of the tokens [start, stop) of the whole file: a view of the memory map, in the file's dtype."""
        return self._tokens[start:stop]

    def document_start(self, document: int) -> int:
        """Token at which a document starts; `num_documents` gives the end of the last one."""
        sequence = int(self._documents[document])
        return (
            int(self._pointers[sequence]) // self.dtype.itemsize if sequence < len(self._pointers) else self.num_tokens
        )

    def document_at(self, token: int) -> int:
        """The document that holds a token: a binary search that touches O(log documents) entries.

        Not np.searchsorted: the index lies at odd addresses, so that it would copy the whole array first.
        """
        return bisect_right(range(self.num_documents), token, key=self.document_start) - 1

    def starts_between(self, start: int, stop: int) -> NDArray[np.int64]:
        """Tokens in (start, stop), both excluded, at which a document starts, ascending, each once."""
        first = self.document_at(start) + 1
        last = bisect_right(range(self.num_documents), stop - 1, lo=first, key=self.document_start)
        # An empty document starts where the next one does, hence unique.
        return np.unique(self._pointers[self._documents[first:last]] // self.dtype.itemsize)


def _read_header(file: Path) -> tuple[np.dtype[Any], int, int]:
    """Dtype, number of sequences and of document bounds, with the file's size checked against them."""
    with file.open("rb") as stream:
        raw = stream.read(HEADER.size)
    if len(raw) < HEADER.size or raw[: len(MAGIC)] != MAGIC:
        raise UserError(f"{file}: not an index of Megatron's .bin/.idx format, or truncated; prepare it anew")
    _, version, code, sequences, bounds = HEADER.unpack(raw)
    if version != 1:
        raise UserError(f"{file}: version {version} of the index format, only 1 is known; prepare it anew")
    if code not in DTYPES:
        raise UserError(f"{file}: dtype code {code} is no integer type, so that these are no token ids")
    size, whole = file.stat().st_size, HEADER.size + 12 * sequences + 8 * bounds
    if size not in (whole, whole + sequences) or bounds < 1:
        state = "truncated" if size < whole else "inconsistent"
        raise UserError(
            f"{file}: {state}: {size} bytes where {sequences} sequences and {bounds} document bounds take {whole}; "
            "prepare it anew"
        )
    return DTYPES[code], sequences, bounds


class TokenWriter:
    """Writes one .bin/.idx pair under temporary names; memory does not grow with the data.

    Used as a context manager it aborts on an exception, and also when `finish` was not called.

    Args:
        prefix: path without .bin or .idx; its folder is made when missing.
        vocab_size: ids are below this; chooses the dtype.
        overwrite: replace what is there, finished or left from a stopped run.

    Raises:
        UserError: the output exists, or is being written by another process.
        OSError: the folder cannot be written.
    """

    def __init__(self, prefix: Path, vocab_size: int, *, overwrite: bool = False) -> None:
        self.prefix = prefix
        self.dtype = token_dtype(vocab_size)
        self.num_documents = 0
        self.num_tokens = 0
        self._partial = {name: prefix.with_name(f"{prefix.name}.{name}.partial") for name in ("bin", "idx", "lengths")}
        self._streams: dict[str, BinaryIO] = {}
        if not overwrite:
            self._refuse_existing()
        self._made = [folder for folder in (prefix.parent, *prefix.parent.parents) if not folder.exists()]
        prefix.parent.mkdir(parents=True, exist_ok=True)
        try:
            for name, path in self._partial.items():
                if overwrite:
                    path.unlink(missing_ok=True)
                self._streams[name] = path.open("xb+")
        except BaseException:
            self.abort()
            raise

    def _refuse_existing(self) -> None:
        for file in (bin_path(self.prefix), idx_path(self.prefix)):
            if file.exists():
                raise UserError(f"{file}: exists already; give another --out, or --force to replace it")
        for file in self._partial.values():
            if file.exists():
                raise UserError(
                    f"{file}: another run is writing this, or one was stopped in the middle; "
                    "give another --out, or --force to replace it"
                )

    def append(self, tokens: NDArray[Any], lengths: NDArray[Any]) -> None:
        """Add documents: their ids one after another, int [T], and the length of each, int [D], summing to T."""
        if int(lengths.sum()) != tokens.size:
            raise ValueError(f"lengths sum to {int(lengths.sum())}, tokens are {tokens.size}")
        self._streams["bin"].write(np.ascontiguousarray(tokens, self.dtype).data)
        self._streams["lengths"].write(np.ascontiguousarray(lengths, "<i4").data)
        self.num_documents += lengths.size
        self.num_tokens += tokens.size

    def finish(self) -> None:
        """Make both files durable and visible, .idx last: a pair with an index is whole."""
        self._write_index()
        for name in ("bin", "idx"):
            self._streams[name].flush()
            os.fsync(self._streams[name].fileno())
        self._close()
        idx_path(self.prefix).unlink(missing_ok=True)  # never an old index beside new tokens
        self._partial["bin"].replace(bin_path(self.prefix))
        self._partial["idx"].replace(idx_path(self.prefix))
        self._partial["lengths"].unlink()
        folder = os.open(self.prefix.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def _write_index(self) -> None:
        index, lengths, count = self._streams["idx"], self._streams["lengths"], self.num_documents
        code = next(code for code, dtype in DTYPES.items() if dtype == self.dtype)
        index.write(HEADER.pack(MAGIC, 1, code, count, count + 1))
        lengths.seek(0)
        while block := lengths.read(4 * CHUNK):
            index.write(block)
        lengths.seek(0)
        offset = 0
        while block := lengths.read(4 * CHUNK):
            ends = offset + np.cumsum(np.frombuffer(block, "<i4"), dtype="<i8") * self.dtype.itemsize
            index.write(np.concatenate([[offset], ends[:-1]]).astype("<i8").data)
            offset = int(ends[-1])
        for start in range(0, count + 1, CHUNK):
            index.write(np.arange(start, min(start + CHUNK, count + 1), dtype="<i8").data)

    def _close(self) -> None:
        for stream in self._streams.values():
            stream.close()

    def abort(self) -> None:
        """Drop everything that this writer wrote."""
        for name, stream in self._streams.items():
            self._partial[name].unlink(missing_ok=True)
            try:
                stream.close()
            except OSError:  # a full disk again, at the last flush; the file is gone anyway
                continue
        self._streams.clear()
        for folder in self._made:
            with contextlib.suppress(OSError):  # it holds something by now
                folder.rmdir()

    def __enter__(self) -> "TokenWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abort()  # after `finish` there is nothing left to drop
