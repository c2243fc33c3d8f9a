"""The default corpus: the source of the Python standard library, real text that is on every machine.

Tokenized by a byte-level BPE that is trained on it on the spot.
"""

import hashlib
import json
import platform
import shutil
import sysconfig
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fmengine.data.tokenizer import END_TOKENS, end_of_document, load_tokenizer, save_tokenizer, train_bpe
from fmengine.data.tokens import TokenReader, TokenWriter
from fmengine.errors import UserError

LEFT_OUT = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "lib2to3", "__pycache__"})
"""Folders that are no part of the corpus: other packages, and tests, which hold long tables."""
BATCH = 64


@dataclass(frozen=True)
class DefaultData:
    """Where the default corpus lies.

    Attributes:
        prefix: of the .bin/.idx pair; hold out its last documents for validation.
        tokenizer: folder that `transformers.AutoTokenizer` loads.
    """

    prefix: Path
    tokenizer: Path


def prepare_default(out: Path, vocab_size: int = 4096) -> DefaultData:
    """Make the default corpus in a folder of its own under `out`, or find it there whole.

    The folder's name says what it is made of (Python's version, the files, the vocabulary). It appears by one
    rename, so that several processes may do this at once.

    Args:
        out: folder for default corpora, shared by runs.
        vocab_size: tokens, at least 2048.

    Raises:
        UserError: the vocabulary is too small, the standard library has no source here, or `out` cannot be written.
    """
    if vocab_size < 2048:
        raise UserError(f"model.vocab_size: the default corpus takes at least 2048, not {vocab_size}")
    root = Path(sysconfig.get_path("stdlib"))
    files = _source_files(root)
    if not files:
        raise UserError(f"{root}: no source of the standard library here; give data.train and data.tokenizer")
    folder = out / _name(root, files, vocab_size)
    if not _is_whole(folder):
        try:
            _make(folder, files, vocab_size)
        except OSError as error:
            raise UserError(f"{error.filename or folder}: {error.strerror}; give another output folder") from error
    return _layout(folder)


def _layout(folder: Path) -> DefaultData:
    return DefaultData(folder / "train", folder / "tokenizer")


def _source_files(root: Path) -> list[Path]:
    """The .py files, by the hash of their names: any stretch of that order is a fair sample of the whole."""
    files = [
        file
        for file in root.rglob("*.py")
        if LEFT_OUT.isdisjoint(file.relative_to(root).parts) and file.stat().st_size > 0
    ]
    return sorted(files, key=lambda file: hashlib.sha256(file.relative_to(root).as_posix().encode()).digest())


def _name(root: Path, files: list[Path], vocab_size: int) -> str:
    listing = [(file.relative_to(root).as_posix(), file.stat().st_size) for file in files]
    digest = hashlib.sha256(json.dumps(listing).encode()).hexdigest()[:12]
    return f"python-{platform.python_version()}-bpe{vocab_size}-{digest}"


def _is_whole(folder: Path) -> bool:
    """Whether both parts open; only damage from outside can make a folder of this name not whole."""
    if not folder.is_dir():
        return False
    try:
        TokenReader(_layout(folder).prefix)
        load_tokenizer(_layout(folder).tokenizer)
    except UserError:
        return False
    return True


def _texts(files: list[Path]) -> Iterator[str]:
    for file in files:
        try:
            yield file.read_text("utf-8")
        except UnicodeDecodeError:  # a few files state another encoding
            continue


def _make(folder: Path, files: list[Path], vocab_size: int) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".making-", dir=folder.parent) as made:
        parts = _layout(Path(made) / "corpus")
        texts = list(_texts(files))
        tokenizer = train_bpe(texts, vocab_size)
        save_tokenizer(tokenizer, parts.tokenizer, END_TOKENS[0])
        _, end_id = end_of_document(tokenizer, parts.tokenizer)
        with TokenWriter(parts.prefix, vocab_size) as writer:
            for start in range(0, len(texts), BATCH):
                for encoding in tokenizer.encode_batch_fast(texts[start : start + BATCH], add_special_tokens=False):
                    document = np.array([*encoding.ids, end_id], np.int32)
                    writer.append(document, np.array([len(document)]))
            writer.finish()
        if folder.exists() and not _is_whole(folder):
            shutil.rmtree(folder)
        try:
            parts.prefix.parent.rename(folder)
        except OSError:
            if not _is_whole(folder):  # else another process was first, with the same bytes
                raise
