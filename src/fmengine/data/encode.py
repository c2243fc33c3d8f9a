"""From blocks of raw lines to token ids: the part of `prepare` that every core runs."""

import json
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from fmengine.data.blocks import Block


@dataclass(frozen=True)
class Encoded:
    """What became of one block.

    Attributes:
        tokens: ids of its documents one after another, each with its end token, int32 [T].
        lengths: tokens of each document, int32 [D].
        text_bytes: UTF-8 bytes of the documents.
        empty: rows whose text is empty.
        bad: for each bad row its place (`file:line`) and what is wrong.
        position: bytes of all input read so far.
    """

    tokens: NDArray[np.int32]
    lengths: NDArray[np.int32]
    text_bytes: int
    empty: int
    bad: list[str]
    position: int


@dataclass(frozen=True)
class Encoder:
    """Turns blocks into tokens.

    Attributes:
        tokenizer: encodes the text.
        end_id: id put behind each document.
        text_key: key of the text in a JSON row.
    """

    tokenizer: Tokenizer
    end_id: int
    text_key: str

    def __call__(self, block: Block) -> Encoded:
        """Encode every good row of a block."""
        tokens: list[NDArray[np.int32]] = []
        text_bytes, empty, bad = 0, 0, []
        for line, raw in _rows(block):
            try:
                text, size = self._text(raw, block.is_document)
            except ValueError as error:
                bad.append(f"{block.file}:{line + _line_of(error)}: {_reason(error)}")
                continue
            if not text:
                empty += 1
                continue
            ids = self.tokenizer.encode(text, add_special_tokens=False).ids
            tokens.append(np.array([*ids, self.end_id], np.int32))
            text_bytes += size
        if block.damage:
            last_line = block.first_line + block.data.count(b"\n")
            bad.append(f"{block.file}:{last_line}: {block.damage}")
        lengths = np.array([len(document) for document in tokens], np.int32)
        joined = np.concatenate(tokens) if tokens else np.empty(0, np.int32)
        return Encoded(joined, lengths, text_bytes, empty, bad, block.position)

    def _text(self, raw: bytes, is_document: bool) -> tuple[str, int]:
        """The text of a row and its size in bytes; ValueError says what is wrong with the row."""
        decoded = raw.decode("utf-8").removeprefix("\ufeff")
        if is_document:
            return decoded, len(decoded.encode())
        try:
            row = json.loads(decoded)
        except RecursionError:
            raise ValueError("JSON nested too deeply") from None
        if not isinstance(row, dict):
            raise ValueError(f"a JSON object was expected, this is {_kind(row)}")
        if self.text_key not in row:
            raise ValueError(f"no key {self.text_key!r}; --text-key names the key of the text")
        text = row[self.text_key]
        if not isinstance(text, str):
            raise ValueError(f"{self.text_key!r} is {_kind(text)}, not a string")
        return text, len(text.encode("utf-8"))


def _rows(block: Block) -> list[tuple[int, bytes]]:
    """Line number and raw bytes of each row; blank lines are none, nor is the unfinished line of a damaged file."""
    if block.is_document:
        return [(block.first_line, block.data)]
    lines = block.data.split(b"\n")
    if block.damage:
        lines.pop()
    return [(number, line) for number, line in enumerate(lines, block.first_line) if line.strip()]


def _line_of(error: ValueError) -> int:
    """Lines between the start of the row and a byte that is not UTF-8; a .txt row has many."""
    return error.object.count(b"\n", 0, error.start) if isinstance(error, UnicodeDecodeError) else 0


def _reason(error: ValueError) -> str:
    if isinstance(error, UnicodeDecodeError):
        return f"not UTF-8: byte 0x{error.object[error.start]:02x}"
    if isinstance(error, UnicodeEncodeError):
        return "the text holds half of a surrogate pair, which UTF-8 cannot express"
    if isinstance(error, json.JSONDecodeError):
        return f"malformed JSON: {error.msg} at column {error.colno}"
    return str(error)


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")
