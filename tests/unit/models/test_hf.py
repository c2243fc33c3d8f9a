import copy
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fmengine.config.model import ModelConfig
from fmengine.errors import UserError
from fmengine.models.hf import DEFAULTS, read_config, write_config
from support.models import tiny_config

LLAMA_OLD = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "factor": 32.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "tie_word_embeddings": True,
}
NEOX_OLD = {
    "model_type": "gpt_neox",
    "vocab_size": 50304,
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "max_position_embeddings": 2048,
    "rotary_pct": 0.5,
    "rotary_emb_base": 20000,
    "use_parallel_residual": False,
}
ROPE_KEYS = ("rope_theta", "rope_scaling", "rotary_pct", "rotary_emb_base")


def read(folder: Path, raw: Any) -> dict[str, Any]:
    (folder / "config.json").write_text(raw if isinstance(raw, str) else json.dumps(raw))
    return read_config(folder)


def new_form(raw: dict[str, Any]) -> dict[str, Any]:
    """What Transformers 5 makes of an old config.json."""
    import transformers

    config = transformers.AutoConfig.for_model(**copy.deepcopy(raw)).to_dict()
    assert not set(ROPE_KEYS) & set(config)
    return config


def test_old_llama_form(tmp_path: Path) -> None:
    fields = read(tmp_path, LLAMA_OLD)
    assert fields["family"] == "llama"
    assert fields["rope_theta"] == 500000.0
    assert fields["rope_scaling"] == LLAMA_OLD["rope_scaling"]
    assert (fields["num_key_value_heads"], fields["head_dim"], fields["tie_word_embeddings"]) == (8, 64, True)


def test_old_neox_form(tmp_path: Path) -> None:
    fields = read(tmp_path, NEOX_OLD)
    assert fields["family"] == "neox"
    assert (fields["rotary_pct"], fields["rope_theta"], fields["rope_scaling"]) == (0.5, 20000.0, None)
    assert (fields["use_parallel_residual"], fields["attention_bias"]) == (False, True)


@pytest.mark.parametrize(
    "raw", [LLAMA_OLD, NEOX_OLD, LLAMA_OLD | {"rope_scaling": None}], ids=["llama", "neox", "none"]
)
def test_both_forms_say_the_same(raw: dict[str, Any], tmp_path: Path) -> None:
    old = read(tmp_path, raw)
    assert read(tmp_path, new_form(raw)) == old
    ModelConfig.model_validate(old)


def test_the_oldest_word_for_the_rope_type(tmp_path: Path) -> None:
    fields = read(tmp_path, LLAMA_OLD | {"rope_scaling": {"type": "linear", "factor": 2.0}})
    assert fields["rope_scaling"] == {"rope_type": "linear", "factor": 2.0}


@pytest.mark.parametrize(("family", "model_type"), [("llama", "llama"), ("neox", "gpt_neox")])
def test_what_is_left_out_is_transformers_default(family: str, model_type: str, tmp_path: Path) -> None:
    import transformers

    raw = {key: value for key, value in (LLAMA_OLD | NEOX_OLD).items() if key.startswith(("num_", "vocab", "max_"))}
    raw |= {"hidden_size": 512, "intermediate_size": 8, "num_key_value_heads": None, "model_type": model_type}
    fields, theirs = read(tmp_path, raw), transformers.AutoConfig.for_model(**raw)
    for name in DEFAULTS[family]:
        assert fields[name] == getattr(theirs, name), name
    assert fields["rope_theta"] == theirs.rope_parameters["rope_theta"]
    assert fields.get("rotary_pct") == theirs.rope_parameters.get("partial_rotary_factor")


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {"num_key_value_heads": 2, "head_dim": 16, "rms_norm_eps": 1e-6, "attention_bias": True}),
        ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 3.0}, "tie_word_embeddings": True}),
        ("llama", {"rope_scaling": LLAMA_OLD["rope_scaling"], "rope_theta": 5e5, "mlp_bias": True}),
        ("neox", {"rotary_pct": 0.5, "rope_theta": 2e4, "hidden_act": "gelu_fast"}),
        ("neox", {"use_parallel_residual": False, "attention_bias": False, "layer_norm_eps": 1e-6}),
    ],
)
@pytest.mark.parametrize("form", ["both", "old", "new"])
def test_what_we_write_we_read(family: str, options: dict[str, Any], form: str, tmp_path: Path) -> None:
    config = tiny_config(family, **options)
    raw = write_config(config)
    if form == "old":
        raw.pop("rope_parameters")
    if form == "new":
        raw = {key: value for key, value in raw.items() if key not in ROPE_KEYS}
    assert ModelConfig.model_validate(read(tmp_path, raw)) == config


@pytest.mark.parametrize(
    ("raw", "parts"),
    [
        (LLAMA_OLD | {"model_type": "mamba"}, ["model_type 'mamba' is not supported", "llama, gpt_neox"]),
        ({"hidden_size": 3}, ["model_type None"]),
        (LLAMA_OLD | {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, ["rope type 'yarn'", "linear, llama3"]),
        (LLAMA_OLD | {"rope_scaling": {"rope_type": "linear"}}, ["needs factor"]),
        (LLAMA_OLD | {"rope_scaling": 3}, ["must be objects, not 3"]),
        (LLAMA_OLD | {"rope_parameters": {"partial_rotary_factor": 0.5}, "rope_scaling": None}, ["partial_rotary"]),
        (NEOX_OLD | {"hidden_act": "relu"}, ["hidden_act 'relu'", "gelu_new"]),
        (NEOX_OLD | {"quantization_config": {"bits": 4}}, ["quantised"]),
        (NEOX_OLD | {"hidden_size": None}, ["hidden_size must be"]),
        (NEOX_OLD | {"num_attention_heads": 0, "vocab_size": "x"}, ["vocab_size, num_attention_heads must be"]),
        ("[1]", ["not a JSON object"]),
        ("{", ["cannot be read as JSON"]),
    ],
)
def test_what_is_not_supported_is_one_line_with_the_file(raw: Any, parts: list[str], tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        read(tmp_path, raw)
    assert "\n" not in str(caught.value)
    for part in [str(tmp_path / "config.json"), *parts]:
        assert part in str(caught.value)


def test_a_folder_without_a_config(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"config\.json: no such file"):
        read_config(tmp_path)


def test_reading_a_config_imports_no_torch(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_OLD))
    code = f"""
import sys
from pathlib import Path
from fmengine.models.hf import read_config
read_config(Path({str(tmp_path)!r}))
sys.exit("torch" in sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True)
