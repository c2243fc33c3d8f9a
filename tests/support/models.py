"""Tiny models, ours and Transformers', with the same random weights."""

from typing import Any

import torch
from torch import Tensor, nn

from fmengine.config.model import FAMILY_OPTIONS, ModelConfig
from fmengine.kernels.attention import dense_attention
from fmengine.models.base import CausalLM
from fmengine.models.hf import from_hf, write_config
from fmengine.models.registry import build
from fmengine.models.weights import load_weights

TINY: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
}


def tiny_config(family: str, **options: Any) -> ModelConfig:
    """A resolved config of two layers; options over the family's defaults."""
    fields = {"family": family, **TINY, **options}
    for name, default in FAMILY_OPTIONS[family].items():
        fields.setdefault(name, default(fields) if callable(default) else default)
    return ModelConfig.model_validate(fields)


def tiny_model(config: ModelConfig, *, mask_documents: bool = True, activation_checkpointing: bool = False) -> CausalLM:
    """Our model with torch's default weights, seeded, on the dense attention."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return build(
            config, attention=dense_attention(mask_documents), activation_checkpointing=activation_checkpointing
        )


def transformers_model(config: ModelConfig, seed: int = 0) -> Any:
    """Transformers' model of the config.json we write, float32, no parameter at a special value."""
    import transformers

    fields = write_config(config)
    hf_config = transformers.AutoConfig.for_model(**fields)
    model = transformers.AutoModelForCausalLM.from_config(hf_config, attn_implementation="eager")
    random_values(model, seed)
    return model.float().eval()


def random_values(model: nn.Module, seed: int) -> None:
    """Fill every parameter with numbers of usual size, norms and biases too."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            is_norm = parameter.ndim == 1 and name.endswith("weight")
            parameter.copy_(1 + 0.2 * noise if is_norm else noise * (0.15 if parameter.ndim > 1 else 0.3))


def hf_values(model: Any, *, gradients: bool = False) -> dict[str, Tensor]:
    """Transformers' weights (or their gradients) by the names that its files have."""
    values = {name: p.grad if gradients else p.detach() for name, p in model.named_parameters()}
    if model.config.model_type == "gpt_neox" and "lm_head.weight" in values:
        values["embed_out.weight"] = values.pop("lm_head.weight")
    return values


def same_weights(model: CausalLM, hf_model: Any) -> CausalLM:
    """Our model, filled with the weights of Transformers'."""
    values = hf_values(hf_model)
    load_weights(model, lambda name: from_hf(model.config, name, values.__getitem__))
    return model


def tokens(rows: int, length: int, vocab_size: int = TINY["vocab_size"], seed: int = 0) -> Tensor:
    """Random token ids [rows, length]."""
    return torch.randint(vocab_size, (rows, length), generator=torch.Generator().manual_seed(seed))


def packed(lengths: list[list[int]], padding: int = 2) -> tuple[Tensor, Tensor]:
    """position_ids [B, S] and cu_seqlens of rows packed with documents of these lengths, empty ones at the end."""
    position_ids = torch.stack([torch.cat([torch.arange(length) for length in row]) for row in lengths])
    bounds = torch.tensor([length for row in lengths for length in row]).cumsum(0)
    cu_seqlens = torch.cat([torch.zeros(1, dtype=torch.long), bounds, bounds[-1:].expand(padding)])
    return position_ids, cu_seqlens.int()


def whole_rows(rows: int, length: int) -> tuple[Tensor, Tensor]:
    """position_ids and cu_seqlens where each row is one document."""
    return packed([[length]] * rows)


def difference(ours: Tensor, theirs: Tensor) -> float:
    """max|a - b| / max|b|."""
    assert ours.shape == theirs.shape
    return float((ours.detach() - theirs.detach()).abs().max() / theirs.detach().abs().max())
