"""Text files to token data: PREFIX.bin, PREFIX.idx and PREFIX.json, which says where they come from."""

import contextlib
import dataclasses
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fmengine import __version__
from fmengine.data.blocks import check_inputs, read_blocks
from fmengine.data.encode import Encoded
from fmengine.data.tokenizer import end_of_document, load_tokenizer, tokenizer_hash, vocab_size
from fmengine.data.tokens import TokenWriter, bin_path
from fmengine.data.workers import EncoderSpec, encode_blocks
from fmengine.errors import UserError


@dataclass(frozen=True)
class Manifest:
    """What PREFIX.json says.

    Attributes:
        documents: documents in the data set.
        tokens: tokens in the data set, end tokens included.
        text_bytes: UTF-8 bytes of the documents' text.
        skipped_rows: bad rows left out (only with on_error="skip").
        empty_rows: rows left out because their text is empty.
        inputs: the files that were read, in order.
        tokenizer_sha256: of its tokenizer.json.
        vocab_size: ids are below this.
        end_of_document: the token behind each document.
        command: how it was made.
        fmengine_version: what made it.
    """

    documents: int
    tokens: int
    text_bytes: int
    skipped_rows: int
    empty_rows: int
    inputs: tuple[str, ...]
    tokenizer_sha256: str
    vocab_size: int
    end_of_document: str
    command: str
    fmengine_version: str


@dataclass(frozen=True)
class Progress:
    """How far `prepare` is: bytes of input read (compressed where they are) of all, and what came of them."""

    read_bytes: int
    total_bytes: int
    documents: int
    tokens: int


def manifest_path(prefix: Path) -> Path:
    """PREFIX.json; a dot in the prefix is part of its name."""
    return prefix.with_name(prefix.name + ".json")


def _nothing(_: object) -> None:
    pass


def prepare(
    inputs: Sequence[Path],
    tokenizer: Path,
    out: Path,
    *,
    workers: int = 1,
    text_key: str = "text",
    on_error: Literal["stop", "skip"] = "stop",
    eod: str | None = None,
    force: bool = False,
    command: str = "",
    on_progress: Callable[[Progress], None] = _nothing,
    on_bad_row: Callable[[str], None] = _nothing,
) -> Manifest:
    """Tokenize files into one data set; the output is the same bytes for any number of workers.

    Memory holds a few blocks of about a mebibyte (or a longest line, or a .txt file) for each worker.

    Args:
        inputs: .jsonl, .jsonl.gz, .jsonl.zst (a document a row) and .txt (a document a file), in this order.
        tokenizer: folder with tokenizer.json, or the file.
        out: prefix of the output.
        workers: processes that tokenize.
        text_key: key of the text in a JSON row.
        on_error: what a bad row does: end the run and leave nothing, or be left out and counted.
        eod: name of the end-of-document token; by default the tokenizer's own.
        force: replace an existing output.
        command: put into the manifest.
        on_progress: called after each block.
        on_bad_row: called with each row that is left out, as `file:line: reason`.

    Raises:
        UserError: an input, the tokenizer or a row is bad, nothing comes out, the output exists or cannot be written.
    """
    total = check_inputs(inputs)
    loaded = load_tokenizer(tokenizer)
    end_token, end_id = end_of_document(loaded, tokenizer, eod)
    size = vocab_size(loaded)
    _refuse_occupied(out, force)
    blocks = encode_blocks(read_blocks(inputs), EncoderSpec(tokenizer, end_id, text_key), workers)
    try:
        with TokenWriter(out, size, overwrite=force) as writer, contextlib.closing(blocks):
            rows = _Rows()
            for encoded in blocks:
                _take(encoded, writer, rows, on_error, on_bad_row)
                on_progress(Progress(encoded.position, total, writer.num_documents, writer.num_tokens))
            if not writer.num_documents:
                raise UserError(f"{out}: the input holds no document ({rows.bad} bad and {rows.empty} empty rows)")
            manifest = Manifest(
                documents=writer.num_documents,
                tokens=writer.num_tokens,
                text_bytes=rows.text_bytes,
                skipped_rows=rows.bad,
                empty_rows=rows.empty,
                inputs=tuple(str(file) for file in inputs),
                tokenizer_sha256=tokenizer_hash(tokenizer),
                vocab_size=size,
                end_of_document=end_token,
                command=command,
                fmengine_version=__version__,
            )
            _finish(writer, manifest)
    except OSError as error:
        raise UserError(f"{error.filename or bin_path(out)}: {error.strerror}; nothing was kept") from error
    return manifest


@dataclass
class _Rows:
    """Counts so far."""

    text_bytes: int = 0
    bad: int = 0
    empty: int = 0


def _take(encoded: Encoded, writer: TokenWriter, rows: _Rows, on_error: str, on_bad_row: Callable[[str], None]) -> None:
    """Write one block's documents and count its rows; a bad row ends the run where it shall."""
    if encoded.bad and on_error == "stop":
        raise UserError(f"{encoded.bad[0]}; mend the row, or leave bad rows out with --on-error skip")
    for row in encoded.bad:
        on_bad_row(row)
    writer.append(encoded.tokens, encoded.lengths)
    rows.text_bytes += encoded.text_bytes
    rows.bad += len(encoded.bad)
    rows.empty += encoded.empty


def _refuse_occupied(out: Path, force: bool) -> None:
    """What TokenWriter does not look at: a folder's name as prefix, and a file where the manifest goes."""
    if out.suffix in (".bin", ".idx"):
        raise UserError(f"--out {out}: give the prefix of the two files, {out.with_suffix('')}")
    if out.is_dir():
        raise UserError(f"{out}: a folder; --out takes the prefix of the files, such as {out / 'train'}")
    if manifest_path(out).exists() and not force:
        raise UserError(f"{manifest_path(out)}: exists already; give another --out, or --force to replace it")


def _finish(writer: TokenWriter, manifest: Manifest) -> None:
    """Manifest first: the index, which makes the data set whole, comes last."""
    file = manifest_path(writer.prefix)
    try:
        file.write_text(json.dumps(dataclasses.asdict(manifest), indent=2) + "\n", "utf-8")
        writer.finish()
    except BaseException:
        file.unlink(missing_ok=True)
        raise
