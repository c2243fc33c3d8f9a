import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models

from fmengine.config.load import load
from fmengine.config.model import FAMILY_OPTIONS
from fmengine.config.resolve import tokenizer_size
from fmengine.config.schema import Config
from fmengine.errors import UserError
from support.configs import MODEL, write_config

LLAMA = {
    "model_type": "llama",
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 500000.0,
}


def pretrained(folder: Path, **changes: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(LLAMA | changes))
    return folder


def write_tokenizer(file: Path, ids: dict[str, int]) -> Path:
    Tokenizer(models.WordLevel(ids, unk_token="a")).save(str(file))
    return file


def load_text(folder: Path, text: str) -> Config:
    return load(write_config(folder, text))


def mistakes(folder: Path, text: str) -> list[str]:
    with pytest.raises(UserError) as caught:
        load_text(folder, text)
    return [problem.removeprefix(f"{folder}/train.yaml:") for problem in caught.value.problems]


@pytest.mark.parametrize("family", sorted(FAMILY_OPTIONS))
def test_no_option_that_a_family_uses_is_none(family: str) -> None:
    model = load(None, [f"model.family={family}"]).model.model_dump()
    unset = {name for name, value in model.items() if value is None}
    others = {name for options in FAMILY_OPTIONS.values() for name in options} - FAMILY_OPTIONS[family].keys()
    assert unset == others | {"pretrained", "rope_scaling"}


def test_defaults_follow_the_family(tmp_path: Path) -> None:
    llama = load_text(tmp_path, MODEL).model
    assert (llama.head_dim, llama.num_key_value_heads, llama.intermediate_size) == (16, 4, 256)
    neox = load_text(tmp_path, MODEL.replace("llama", "neox")).model
    assert (neox.intermediate_size, neox.use_parallel_residual, neox.hidden_act) == (256, True, "gelu")


def test_the_longest_context_is_the_sequence_length(tmp_path: Path) -> None:
    assert load_text(tmp_path, f"{MODEL}data: {{sequence_length: 96}}\n").model.max_position_embeddings == 96


def test_an_option_of_the_other_family_is_a_mistake_with_its_line(tmp_path: Path) -> None:
    (found,) = mistakes(tmp_path, f"{MODEL}  rotary_pct: 0.5\n")
    assert found == "7: model.rotary_pct: family llama has no such option (family neox has); leave it out"
    assert load_text(tmp_path, f"{MODEL}  rotary_pct: null\n").model.rotary_pct is None


@pytest.mark.parametrize(
    ("change", "more", "words"),
    [
        ("hidden_size: 66", "", "num_attention_heads: 4 heads do not divide hidden_size 66"),
        ("hidden_size: 64", "  num_key_value_heads: 3\n", "num_key_value_heads: 3 do not divide"),
        ("hidden_size: 64", "  head_dim: 15\n", "head_dim: 15 of the 15 dimensions"),
        ("hidden_size: 12", "", "head_dim: 3 of the 3 dimensions"),
        (
            "hidden_size: 64",
            "  rope_scaling: {rope_type: llama3, factor: 8, low_freq_factor: 4}\n",
            "rope_scaling.high_freq_factor: must be above low_freq_factor 4.0, not 4.0",
        ),
    ],
)
def test_numbers_that_do_not_fit(tmp_path: Path, change: str, more: str, words: str) -> None:
    (found,) = mistakes(tmp_path, MODEL.replace("hidden_size: 64", change) + more)
    assert words in found


def test_heads_need_not_divide_the_hidden_size_when_their_width_is_given(tmp_path: Path) -> None:
    text = MODEL.replace("hidden_size: 64", "hidden_size: 66")
    assert load_text(tmp_path, f"{text}  head_dim: 32\n").model.head_dim == 32


def test_neox_rotates_an_even_part_of_a_head(tmp_path: Path) -> None:
    (found,) = mistakes(tmp_path, f"{MODEL.replace('llama', 'neox')}  rotary_pct: 0.2\n")
    assert found.startswith("7: model.rotary_pct: 3 of the 16 dimensions")


def test_the_vocabulary_is_the_tokenizers(tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "tokenizer.json", {"a": 0, "b": 9})
    text = MODEL.replace("  vocab_size: 512\n", "")
    for tokenizer in (tmp_path, tmp_path / "tokenizer.json"):
        assert load_text(tmp_path, f"{text}data: {{tokenizer: {tokenizer}}}\n").model.vocab_size == 10
    assert load_text(tmp_path, f"{MODEL}data: {{tokenizer: {tmp_path}}}\n").model.vocab_size == 512


def test_no_vocabulary_and_no_tokenizer(tmp_path: Path) -> None:
    text = MODEL.replace("  vocab_size: 512\n", "")
    assert mistakes(tmp_path, text) == ["1: model.vocab_size: needed here, and not given (or give data.tokenizer)"]
    (found,) = mistakes(tmp_path, f"{text}data: {{tokenizer: {tmp_path / 'none'}}}\n")
    assert found.startswith(f"6: data.tokenizer: {tmp_path / 'none'}: no such file")


def test_a_tokenizer_that_is_none(tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.json"
    file.write_text("{}")
    with pytest.raises(UserError, match="not a tokenizer") as caught:
        tokenizer_size(file)
    assert "\n" not in str(caught.value)


def test_the_architecture_comes_from_the_pretrained_folder(tmp_path: Path) -> None:
    folder = pretrained(tmp_path / "hf")
    model = load_text(tmp_path, f"model: {{pretrained: {folder}, pad_vocab_to_multiple_of: 128}}\n").model
    assert (model.family, model.vocab_size, model.num_key_value_heads) == ("llama", 300, 2)
    assert (model.rms_norm_eps, model.rope_theta, model.max_position_embeddings) == (1e-6, 500000.0, 512)
    assert (model.pretrained, model.padded_vocab_size) == (folder, 384)


def test_the_pretrained_folders_tokenizer_is_used_unless_another_is_given(tmp_path: Path) -> None:
    folder = pretrained(tmp_path / "hf")
    text = f"model: {{pretrained: {folder}}}\n"
    assert load_text(tmp_path, text).data.tokenizer is None
    write_tokenizer(folder / "tokenizer.json", {"a": 0})
    assert load_text(tmp_path, text).data.tokenizer == folder
    other = write_tokenizer(tmp_path / "other.json", {"a": 0})
    assert load_text(tmp_path, f"{text}data: {{tokenizer: {other}}}\n").data.tokenizer == other


def test_keys_beside_pretrained_must_say_the_same(tmp_path: Path) -> None:
    folder = pretrained(tmp_path / "hf")
    text = f"model:\n  pretrained: {folder}\n"
    assert load_text(tmp_path, f"{text}  hidden_size: 64\n  tie_word_embeddings: false\n").model.hidden_size == 64
    found = mistakes(tmp_path, f"{text}  hidden_size: 128\n  rope_scaling: {{rope_type: linear, factor: 2}}\n")
    assert found[0] == f"3: model.hidden_size: 128 here, but 64 in {folder}/config.json; leave it out"
    assert "model.rope_scaling" in found[1]
    assert "but empty in" in found[1]


def test_a_pretrained_folder_that_is_not_there_or_wrong(tmp_path: Path) -> None:
    (found,) = mistakes(tmp_path, f"model: {{pretrained: {tmp_path / 'none'}}}\n")
    assert found.startswith("1: model.pretrained: ")
    folder = pretrained(tmp_path / "hf", rms_norm_eps="tiny")
    (found,) = mistakes(tmp_path, f"model: {{pretrained: {folder}}}\n")
    assert "config.json: rms_norm_eps: must be a number" in found
