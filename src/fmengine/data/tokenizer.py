"""Tokenizers: a tokenizer.json of Hugging Face's `tokenizers`, alone or in a model's folder.

Text is encoded as the tokenizer itself does it, without the special tokens that it adds around a
text and without its truncation or padding; a special token's name inside the text becomes that token.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from fmengine.errors import UserError

FILE = "tokenizer.json"
CONFIG = "tokenizer_config.json"
COMPANIONS = ("special_tokens_map.json", "chat_template.jinja", "added_tokens.json")
"""Files of a tokenizer folder that say more about the same tokenizer."""
END_TOKENS = ("<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>")
"""Names of the end-of-document token where nothing states it: GPT-2 and NeoX, LLaMA 1 and 2, LLaMA 3, Gemma."""


def tokenizer_file(path: Path) -> Path:
    """The tokenizer.json that a folder or the file itself stands for.

    Raises:
        UserError: there is none.
    """
    file = path / FILE if path.is_dir() else path
    if not file.is_file():
        raise UserError(f"{file}: no such file; give a folder with {FILE} (of a fast tokenizer), or the file itself")
    return file


def load_tokenizer(path: Path) -> Tokenizer:
    """Read a tokenizer from a folder with tokenizer.json or from that file.

    Raises:
        UserError: it is missing or cannot be read.
    """
    file = tokenizer_file(path)
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises plain Exception for a file that is broken
        reason = " ".join(str(error).split())
        raise UserError(f"{file}: not a tokenizer that `tokenizers` reads: {reason}; save it anew") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def tokenizer_hash(path: Path) -> str:
    """SHA-256 of tokenizer.json, hexadecimal."""
    return hashlib.sha256(tokenizer_file(path).read_bytes()).hexdigest()


def vocab_size(tokenizer: Tokenizer) -> int:
    """One more than the largest id, so that every id is below it also where the vocabulary has holes."""
    return max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1


def end_of_document(tokenizer: Tokenizer, path: Path, name: str | None = None) -> tuple[str, int]:
    """Name and id of the token that ends a document: the one named, else the folder's eos_token, else a known one.

    Raises:
        UserError: the name is not in the vocabulary, or nothing says which token it is.
    """
    config = tokenizer_file(path).with_name(CONFIG)
    stated = name or _stated_end(config)
    for known in [stated] if stated is not None else END_TOKENS:
        number = tokenizer.token_to_id(known)
        if number is not None:
            return known, number
    if stated is not None:
        where = "--eod" if name else f"{config}: eos_token"
        raise UserError(f"{where}: {stated!r} is not in the vocabulary of {path}; name a token that is with --eod")
    raise UserError(f"{path}: nothing says which token ends a document; name it with --eod")


def _stated_end(config: Path) -> str | None:
    """The eos_token of tokenizer_config.json: a string, or in older files an object with `content`."""
    if not config.is_file():
        return None
    token = _read_config(config).get("eos_token")
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) else None


def _read_config(config: Path) -> dict[str, Any]:
    try:
        values = json.loads(config.read_text("utf-8"))
    except ValueError as error:
        raise UserError(f"{config}: not JSON: {error}; mend it or remove it") from error
    if not isinstance(values, dict):
        raise UserError(f"{config}: not a JSON object; mend it or remove it")
    return values


def token_byte_lengths(tokenizer: Tokenizer) -> NDArray[np.int32]:
    """Bytes of UTF-8 text that each token stands for, int32 [V]; special tokens 0. For bits per byte.

    Exact for byte-level BPE, whose tokens are spelled with one character a byte. In SentencePiece's manner
    '▁' is a space and <0xNN> one byte.
    """
    lengths = np.zeros(vocab_size(tokenizer), np.int32)
    byte_level = _is_byte_level(json.loads(tokenizer.to_str()))
    for token, number in tokenizer.get_vocab(with_added_tokens=True).items():
        lengths[number] = len(token) if byte_level else _sentencepiece_bytes(token)
    for number, added in tokenizer.get_added_tokens_decoder().items():
        lengths[number] = 0 if added.special else len(added.content.encode())
    return lengths


def _is_byte_level(value: Any) -> bool:
    """Whether a ByteLevel part is anywhere in the parsed tokenizer.json."""
    if isinstance(value, dict):
        if value.get("type") == "ByteLevel":
            return True
        parts = (value.get(key) for key in ("pre_tokenizer", "decoder", "pretokenizers", "decoders"))
        return any(_is_byte_level(part) for part in parts)
    return isinstance(value, list) and any(_is_byte_level(part) for part in value)


def _sentencepiece_bytes(token: str) -> int:
    is_byte = len(token) == 6 and token.startswith("<0x") and token.endswith(">")
    return 1 if is_byte else len(token.replace("▁", " ").encode())


def save_tokenizer(tokenizer: Tokenizer, folder: Path, end_token: str) -> None:
    """Write a folder that `transformers.AutoTokenizer` loads."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / FILE))
    _write_config(folder / CONFIG, {}, end_token)


def copy_tokenizer(path: Path, folder: Path, end_token: str) -> None:
    """Copy a tokenizer, tokenizer.json unchanged, into a folder that `transformers.AutoTokenizer` loads.

    What the source's tokenizer_config.json says stays; its eos_token and class are filled in where missing.

    Raises:
        UserError: the source is missing, or its tokenizer_config.json is broken.
    """
    source = tokenizer_file(path)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / FILE).write_bytes(source.read_bytes())
    for name in COMPANIONS:
        if source.with_name(name).is_file():
            (folder / name).write_bytes(source.with_name(name).read_bytes())
    config = source.with_name(CONFIG)
    _write_config(folder / CONFIG, _read_config(config) if config.is_file() else {}, end_token)


def _write_config(file: Path, given: dict[str, Any], end_token: str) -> None:
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **given}
    if not config.get("eos_token"):
        config["eos_token"] = end_token
    # The decoder's own spacing; by default Transformers would join "a ." to "a.", and text would not survive.
    config.setdefault("clean_up_tokenization_spaces", False)
    file.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", "utf-8")


def train_bpe(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE (GPT-2's scheme): any text survives; <|endoftext|> is token 0.

    Args:
        texts: documents.
        vocab_size: tokens, the 256 bytes and the end token among them; fewer when the texts hold no more pairs.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_TOKENS[0]],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_batches(texts), trainer)
    return tokenizer


def _batches(texts: Iterable[str], size: int = 64) -> Iterator[list[str]]:
    """Lists of texts: the trainer takes those with one crossing into Rust each."""
    batch: list[str] = []
    for text in texts:
        batch.append(text)
        if len(batch) == size:
            yield batch
            batch = []
    yield batch
