"""Rules that a model's own numbers must keep, whatever it runs on."""

from typing import Any

from fmengine.config.model import FAMILY_OPTIONS, ModelConfig
from fmengine.config.source import Problem, problem

REQUIRED = ("family", "hidden_size", "num_hidden_layers", "num_attention_heads")
"""What has no default when the architecture is not read from a Hugging Face folder."""

COMMON = {*REQUIRED, "pretrained", "vocab_size", "pad_vocab_to_multiple_of", "max_position_embeddings"}
"""Options of every family."""


def option_problems(model: dict[str, Any]) -> list[Problem]:
    """Options that the family of a `model:` section does not know; null ones count as not given."""
    family = model.get("family")
    if not isinstance(family, str) or family not in FAMILY_OPTIONS:
        return []
    found = []
    for name in ModelConfig.model_fields:
        if model.get(name) is None or name in COMMON or name in FAMILY_OPTIONS[family]:
            continue
        others = [other for other, options in FAMILY_OPTIONS.items() if name in options]
        text = f"family {family} has no such option (family {' and '.join(others)} has); leave it out"
        found.append(problem(f"model.{name}", text))
    return found


def required_problems(model: dict[str, Any]) -> list[Problem]:
    """Keys without which there is no architecture."""
    if model.get("pretrained") is not None:
        return []
    text = "needed here, and not given (or give model.pretrained)"
    return [problem(f"model.{name}", text) for name in REQUIRED if model.get(name) is None]


def width_problems(model: dict[str, Any]) -> list[Problem]:
    """Heads that do not divide the hidden size, where that gives their width; before defaults are filled in."""
    hidden, heads = model["hidden_size"], model["num_attention_heads"]
    if model.get("head_dim") is not None or hidden % heads == 0:
        return []
    return [problem("model.num_attention_heads", f"{heads} heads do not divide hidden_size {hidden}")]


def shape_problems(model: ModelConfig) -> list[Problem]:
    """Numbers of a resolved model that do not fit each other."""
    found = []
    hidden, heads = model.hidden_size or 0, model.num_attention_heads or 1
    kv_heads = model.num_key_value_heads or heads
    if heads % kv_heads:
        text = f"{kv_heads} do not divide num_attention_heads {heads}; each serves a whole number of query heads"
        found.append(problem("model.num_key_value_heads", text))
    head_dim = model.head_dim or hidden // heads
    rotated = int(head_dim * (model.rotary_pct or 1.0))
    if not found and (rotated % 2 or not rotated):
        key = "model.rotary_pct" if model.rotary_pct else "model.head_dim"
        text = f"{rotated} of the {head_dim} dimensions of a head would be rotated; rotary pairs need an even number"
        found.append(problem(key, text))
    scaling = model.rope_scaling
    if scaling and scaling.rope_type == "llama3" and scaling.high_freq_factor <= scaling.low_freq_factor:
        text = f"must be above low_freq_factor {scaling.low_freq_factor}, not {scaling.high_freq_factor}"
        found.append(problem("model.rope_scaling.high_freq_factor", text))
    return found
