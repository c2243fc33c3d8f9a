import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer

from fmengine.data.tokenizer import (
    copy_tokenizer,
    end_of_document,
    load_tokenizer,
    save_tokenizer,
    token_byte_lengths,
    tokenizer_hash,
    train_bpe,
    vocab_size,
)
from fmengine.errors import UserError


def words(*names: str, special: tuple[str, ...] = ()) -> Tokenizer:
    tokenizer = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token=names[0]))
    tokenizer.add_special_tokens(list(special))
    return tokenizer


def test_a_folder_and_its_file_are_the_same(tokenizer_dir: Path) -> None:
    whole, alone = load_tokenizer(tokenizer_dir), load_tokenizer(tokenizer_dir / "tokenizer.json")
    assert whole.to_str() == alone.to_str()
    assert tokenizer_hash(tokenizer_dir) == tokenizer_hash(tokenizer_dir / "tokenizer.json")


def test_a_missing_or_broken_tokenizer_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"tokenizer\.json: no such file"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"model": ')
    with pytest.raises(UserError, match=r"tokenizer\.json: not a tokenizer") as caught:
        load_tokenizer(tmp_path)
    assert "\n" not in str(caught.value)


def test_truncation_and_padding_of_the_file_are_off(tokenizer: Tokenizer, tmp_path: Path) -> None:
    limited = Tokenizer.from_str(tokenizer.to_str())
    limited.enable_truncation(2)
    limited.enable_padding(length=50)
    limited.save(str(tmp_path / "tokenizer.json"))
    assert load_tokenizer(tmp_path).encode("the lazy dog").ids == tokenizer.encode("the lazy dog").ids


@pytest.mark.parametrize("stated", ["b", {"content": "b", "lstrip": False}])
def test_the_end_token_is_the_named_then_the_stated_then_a_known_one(tmp_path: Path, stated: object) -> None:
    tokenizer = words("a", "b", "</s>")
    assert end_of_document(tokenizer, save(tokenizer, tmp_path)) == ("</s>", 2)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": stated}))
    assert end_of_document(tokenizer, tmp_path) == ("b", 1)
    assert end_of_document(tokenizer, tmp_path / "tokenizer.json") == ("b", 1)
    assert end_of_document(tokenizer, tmp_path, "a") == ("a", 0)


def save(tokenizer: Tokenizer, folder: Path) -> Path:
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def test_an_unknown_end_token_is_refused(tmp_path: Path) -> None:
    tokenizer = words("a", "b")
    save(tokenizer, tmp_path)
    with pytest.raises(UserError, match="name it with --eod"):
        end_of_document(tokenizer, tmp_path)
    with pytest.raises(UserError, match="--eod: 'c' is not in the vocabulary"):
        end_of_document(tokenizer, tmp_path, "c")
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "c"}')
    with pytest.raises(UserError, match=r"tokenizer_config\.json: eos_token: 'c'"):
        end_of_document(tokenizer, tmp_path)
    for broken in ("{", "[]"):
        (tmp_path / "tokenizer_config.json").write_text(broken)
        with pytest.raises(UserError, match=r"tokenizer_config\.json: not"):
            end_of_document(tokenizer, tmp_path)


def test_the_vocabulary_counts_holes() -> None:
    assert vocab_size(Tokenizer(models.WordLevel({"a": 0, "b": 7}, unk_token="a"))) == 8


@settings(max_examples=50)
@given(text=st.text())
def test_byte_lengths_of_byte_level_tokens_are_exact(tokenizer: Tokenizer, text: str) -> None:
    lengths = token_byte_lengths(tokenizer)
    assert lengths[tokenizer.encode(text).ids].sum() == len(text.encode())


def test_special_tokens_stand_for_no_text(tokenizer: Tokenizer) -> None:
    assert token_byte_lengths(tokenizer)[tokenizer.token_to_id("<|endoftext|>")] == 0


def test_added_tokens_stand_for_themselves() -> None:
    tokenizer = train_bpe(["abc"], 260)
    tokenizer.add_tokens([AddedToken("  é", special=False)])
    assert token_byte_lengths(tokenizer)[tokenizer.token_to_id("  é")] == 4


def test_byte_lengths_in_the_manner_of_sentencepiece() -> None:
    tokenizer = words("<unk>", "▁the", "é", "<0x0A>", "<0x0A", "▁▁", special=("<unk>", "</s>"))
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    assert token_byte_lengths(tokenizer).tolist() == [0, 4, 2, 1, 5, 2, 0]


def test_byte_level_is_found_inside_a_sequence() -> None:
    tokenizer = train_bpe(["é é é"], 270)
    tokenizer.decoder = decoders.Fuse()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(), pre_tokenizers.ByteLevel(False)])
    assert token_byte_lengths(tokenizer)[tokenizer.encode("é é").ids].sum() == 5


def test_transformers_loads_what_is_saved(tokenizer: Tokenizer, tmp_path: Path) -> None:
    save_tokenizer(tokenizer, tmp_path / "t", "<|endoftext|>")
    theirs = AutoTokenizer.from_pretrained(tmp_path / "t")
    text = "the naïve fox , says : don 't ! <|endoftext|> 東京"
    assert theirs(text)["input_ids"] == tokenizer.encode(text).ids
    assert theirs.decode(theirs(text)["input_ids"]) == text
    assert theirs.eos_token == "<|endoftext|>"
    assert theirs.eos_token_id == tokenizer.token_to_id("<|endoftext|>")


def test_a_copy_keeps_what_the_source_says(tokenizer_dir: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    copy_tokenizer(tokenizer_dir, source, "<|endoftext|>")
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 77, "eos_token": "the"}
    (source / "tokenizer_config.json").write_text(json.dumps(config))
    (source / "chat_template.jinja").write_text("{{ messages }}")
    copy_tokenizer(source, tmp_path / "copy", "<|endoftext|>")
    theirs = AutoTokenizer.from_pretrained(tmp_path / "copy")
    assert (theirs.model_max_length, theirs.eos_token) == (77, "the")
    assert theirs.chat_template == "{{ messages }}"
    assert tokenizer_hash(tmp_path / "copy") == tokenizer_hash(tokenizer_dir)


def test_a_copy_of_a_lone_file_gets_an_end_token(tokenizer_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "lone.json").write_bytes((tokenizer_dir / "tokenizer.json").read_bytes())
    copy_tokenizer(tmp_path / "lone.json", tmp_path / "copy", "<|endoftext|>")
    assert AutoTokenizer.from_pretrained(tmp_path / "copy").eos_token == "<|endoftext|>"


def test_training_is_deterministic_and_of_the_size_asked() -> None:
    texts = ["some words are more common than other words, some words"] * 100
    first, second = train_bpe(texts, 280), train_bpe(iter(texts), 280)
    assert first.to_str() == second.to_str()
    assert vocab_size(first) == 280
    assert first.token_to_id("<|endoftext|>") == 0
