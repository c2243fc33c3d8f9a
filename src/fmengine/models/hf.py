"""Hugging Face's config.json and tensor names, in and out. Importing this imports no torch."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fmengine.config.model import ModelConfig, RopeScaling
from fmengine.errors import UserError
from fmengine.models.names import ParameterName
from fmengine.models.resolved import known

if TYPE_CHECKING:
    from torch import Tensor

MODEL_TYPES = {"llama": "llama", "gpt_neox": "neox"}
"""config.json's `model_type` -> family."""

ARCHITECTURES = {"llama": "LlamaForCausalLM", "neox": "GPTNeoXForCausalLM"}

REQUIRED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
)
"""Keys that every config.json must have; they keep their names in ours."""

DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {
        "num_key_value_heads": None,
        "head_dim": None,
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "mlp_bias": False,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "initializer_range": 0.02,
    },
    "neox": {
        "layer_norm_eps": 1e-5,
        "use_parallel_residual": True,
        "attention_bias": True,
        "hidden_act": "gelu",
        "tie_word_embeddings": False,
        "initializer_range": 0.02,
    },
}
"""What a key means where config.json leaves it out: Transformers' `LlamaConfig` and `GPTNeoXConfig`, not our own."""

ROPE_SCALING_KEYS = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}

IGNORED = (
    r"(.*\.)?rotary_emb\.inv_freq",  # tables that older versions saved
    r"gpt_neox\.layers\.\d+\.attention\.(bias|masked_bias)",  # causal masks, likewise
)
IGNORED_IF_TIED = (r"lm_head\.weight", r"embed_out\.weight")


def read_config(folder: Path) -> dict[str, Any]:
    """The architecture in a Hugging Face folder, as fields of `ModelConfig`.

    Args:
        folder: holds a config.json of Transformers 4 (rope_theta, rope_scaling, rotary_pct, rotary_emb_base) or
            5 (rope_parameters).

    Returns:
        Every architecture field that the family uses, `family` itself included.

    Raises:
        UserError: the file is missing or no JSON, lacks a key, or describes what is not supported.
    """
    path = folder / "config.json"
    raw = _read_json(path)
    family = MODEL_TYPES.get(str(raw.get("model_type")))
    if family is None:
        raise UserError(f"{path}: model_type {raw.get('model_type')!r} is not supported; {_choices(MODEL_TYPES)} are")
    if raw.get("quantization_config"):
        raise UserError(f"{path}: quantization_config: quantised weights are not supported; take the original model")
    wrong = [key for key in REQUIRED if not isinstance(raw.get(key), int) or raw[key] < 1]
    if wrong:
        raise UserError(f"{path}: {', '.join(wrong)} must be there, each a whole number above 0")
    fields: dict[str, Any] = {"family": family} | {key: raw[key] for key in REQUIRED}
    fields |= {key: raw.get(key, default) for key, default in DEFAULTS[family].items()}
    if family == "llama":
        heads = raw["num_attention_heads"]
        fields["num_key_value_heads"] = fields["num_key_value_heads"] or heads
        fields["head_dim"] = fields["head_dim"] or raw["hidden_size"] // heads
    fields |= _read_rope(path, raw, family)
    _check_activation(path, fields["hidden_act"])
    return fields


def write_config(config: ModelConfig) -> dict[str, Any]:
    """The config.json of a resolved config, with the rope keys of both Transformers 4 and 5.

    Special tokens are null, so that Transformers does not put its own in: the tokenizer's are the exporter's to set,
    as is `dtype`.
    """
    family, fields = known(config.family), config.model_dump()
    model_type = next(key for key, value in MODEL_TYPES.items() if value == family)
    result: dict[str, Any] = {"architectures": [ARCHITECTURES[family]], "model_type": model_type}
    result |= {key: fields[key] for key in (*REQUIRED, *DEFAULTS[family])}
    result |= {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None, "use_cache": True}
    scaling = _write_scaling(config.rope_scaling)
    parameters: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rope_theta, **(scaling or {})}
    if family == "neox":
        result |= {"rotary_pct": config.rotary_pct, "rotary_emb_base": config.rope_theta}
        parameters["partial_rotary_factor"] = config.rotary_pct
    else:
        result["rope_theta"] = config.rope_theta
    return result | {"rope_scaling": scaling, "rope_parameters": parameters}


def to_hf(config: ModelConfig, name: str, tensor: "Tensor") -> dict[str, "Tensor"]:
    """One canonical parameter as Hugging Face's tensors; padding is cut off, the type stays.

    Args:
        config: a resolved model config.
        name: canonical name.
        tensor: the full parameter.

    Returns:
        Hugging Face name -> tensor, views of the given one. Empty for nothing.
    """
    if ParameterName.parse(name).is_vocabulary:
        tensor = tensor[: config.vocab_size]
    shapes = hf_names(config, name, tuple(tensor.shape))
    parts = tensor.split_with_sizes([shape[0] for shape in shapes.values()], dim=0)
    return dict(zip(shapes, parts, strict=True))


def from_hf(config: ModelConfig, name: str, read: Callable[[str], "Tensor"]) -> "Tensor":
    """One canonical parameter from Hugging Face's tensors: the inverse of `to_hf`, padded rows zero.

    Args:
        config: a resolved model config.
        name: canonical name.
        read: Hugging Face name -> tensor.
    """
    import torch

    parts = [read(hf_name) for hf_name in _hf_parts(config, name)]
    if ParameterName.parse(name).is_vocabulary and config.padded_vocab_size > parts[0].shape[0]:
        parts.append(parts[0].new_zeros(config.padded_vocab_size - parts[0].shape[0], parts[0].shape[1]))
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def hf_names(config: ModelConfig, name: str, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """Hugging Face's tensors of one canonical parameter: name -> shape, in the order of the rows.

    Args:
        config: a resolved model config.
        name: canonical name.
        shape: the parameter's shape, with or without padded rows.
    """
    from fmengine.models.registry import family_of  # torch

    parameter = ParameterName.parse(name)
    fused = family_of(config).fused_rows(config)
    whole = known(config.vocab_size) if parameter.is_vocabulary else shape[0]
    rows = fused.get(parameter.module, (whole,))
    return {part: (count, *shape[1:]) for part, count in zip(_hf_parts(config, name), rows, strict=True)}


def is_ignored(config: ModelConfig, hf_name: str) -> bool:
    """Whether a tensor in a Hugging Face folder is one that holds no weight of the model."""
    patterns = IGNORED + (IGNORED_IF_TIED if config.tie_word_embeddings else ())
    return any(re.fullmatch(pattern, hf_name) for pattern in patterns)


def _hf_parts(config: ModelConfig, name: str) -> list[str]:
    from fmengine.models.registry import family_of  # torch

    parameter = ParameterName.parse(name)
    modules = family_of(config).hf_modules[parameter.module]
    return [f"{module.format(parameter.layer)}.{parameter.leaf}" for module in modules]


def _read_json(path: Path) -> dict[str, Any]:
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UserError(f"{path}: no such file; model.pretrained must be a Hugging Face folder") from error
    except (ValueError, OSError) as error:
        raise UserError(f"{path}: cannot be read as JSON ({error})") from error
    if not isinstance(raw, dict):
        raise UserError(f"{path}: not a JSON object; this is no config of a model")
    return raw


def _read_rope(path: Path, raw: dict[str, Any], family: str) -> dict[str, Any]:
    # the order of precedence is Transformers' (`convert_rope_params_to_dict`)
    parameters = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    if not isinstance(parameters, dict):
        raise UserError(f"{path}: rope_scaling and rope_parameters must be objects, not {parameters!r}")
    theta = parameters.get("rope_theta") or raw.get("rotary_emb_base" if family == "neox" else "rope_theta") or 10000.0
    fields: dict[str, Any] = {"rope_theta": float(theta), "rope_scaling": _read_scaling(path, raw, parameters)}
    share = parameters.get("partial_rotary_factor")
    if family == "neox":
        fields["rotary_pct"] = float(raw.get("rotary_pct", 0.25) if share is None else share)
    elif share not in (None, 1):
        raise UserError(f"{path}: partial_rotary_factor {share} is not supported for llama; only 1 is")
    return fields


def _read_scaling(path: Path, raw: dict[str, Any], parameters: dict[str, Any]) -> dict[str, Any] | None:
    rope_type = parameters.get("rope_type", parameters.get("type", "default"))
    if rope_type == "default":
        return None
    if rope_type not in ROPE_SCALING_KEYS:
        raise UserError(f"{path}: rope type {rope_type!r} is not supported; default, {_choices(ROPE_SCALING_KEYS)} are")
    given = {"original_max_position_embeddings": raw["max_position_embeddings"]} | parameters
    missing = [key for key in ROPE_SCALING_KEYS[rope_type] if given.get(key) is None]
    if missing:
        raise UserError(f"{path}: rope type {rope_type!r} needs {', '.join(missing)}")
    return {"rope_type": rope_type} | {key: given[key] for key in ROPE_SCALING_KEYS[rope_type]}


def _write_scaling(scaling: RopeScaling | None) -> dict[str, Any] | None:
    if scaling is None:
        return None
    fields = scaling.model_dump()
    return {key: fields[key] for key in ("rope_type", *ROPE_SCALING_KEYS[scaling.rope_type])}


def _check_activation(path: Path, act: Any) -> None:
    supported = ("silu", "gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh")
    if act not in supported:
        raise UserError(f"{path}: hidden_act {act!r} is not supported; {', '.join(supported)} are")


def _choices(options: dict[str, Any]) -> str:
    return ", ".join(options)
