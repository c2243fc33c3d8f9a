"""LLaMA 1, 2 and 3 (Touvron et al., arXiv 2302.13971; Grattafiori et al., arXiv 2407.21783): architecture only."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from fmengine.config.model import ModelConfig
from fmengine.kernels.attention import Attention
from fmengine.models.family import Family, head_dim
from fmengine.models.layers import Block, GatedMLP, SelfAttention
from fmengine.models.resolved import known
from fmengine.models.rotary import Rotary


class LlamaAttention(SelfAttention):
    """Attention whose fused rows are [q; k; v], with fewer key-value heads than query heads (GQA)."""

    def split_heads(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[B, S, rows of this shard] -> q [B, S, H, D], k and v [B, S, KV, D]."""
        key_value_rows = qkv.shape[-1] // (self.queries_per_group + 2)
        query_rows = key_value_rows * self.queries_per_group
        parts = torch.split_with_sizes(qkv, [query_rows, key_value_rows, key_value_rows], dim=-1)
        q, k, v = (part.view(*part.shape[:-1], -1, self.head_dim) for part in parts)
        return q, k, v


def norm(config: ModelConfig) -> nn.RMSNorm:
    """RMSNorm (Zhang and Sennrich, arXiv 1910.07467)."""
    return nn.RMSNorm(known(config.hidden_size), eps=config.rms_norm_eps)


def block(config: ModelConfig, attention: Attention, activation_checkpointing: bool) -> Block:
    """One layer."""
    width = head_dim(config)
    attn = LlamaAttention(
        known(config.hidden_size),
        known(config.num_attention_heads),
        known(config.num_key_value_heads),
        width,
        bias=known(config.attention_bias),
        rotary=Rotary(width, known(config.rope_theta), config.rope_scaling),
        attention=attention,
    )
    mlp = GatedMLP(
        known(config.hidden_size),
        known(config.intermediate_size),
        act=known(config.hidden_act),
        bias=known(config.mlp_bias),
    )
    return Block(
        norm(config),
        attn,
        norm(config),
        mlp,
        parallel_residual=False,
        activation_checkpointing=activation_checkpointing,
    )


def initial_std(config: ModelConfig, _name: str) -> float:
    """normal(0, initializer_range) for every matrix: Transformers' `LlamaPreTrainedModel`; the papers give none."""
    return known(config.initializer_range)


def fused_rows(config: ModelConfig) -> Mapping[str, tuple[int, ...]]:
    """Rows of the parts of the fused matrices."""
    query = known(config.num_attention_heads) * head_dim(config)
    key_value = known(config.num_key_value_heads) * head_dim(config)
    inner = known(config.intermediate_size)
    return {"attn.qkv": (query, key_value, key_value), "mlp.gate_up": (inner, inner)}


LLAMA = Family(
    block=block,
    norm=norm,
    initial_std=initial_std,
    fused_rows=fused_rows,
    hf_modules={
        "embed": ("model.embed_tokens",),
        "attn_norm": ("model.layers.{}.input_layernorm",),
        "attn.qkv": (
            "model.layers.{}.self_attn.q_proj",
            "model.layers.{}.self_attn.k_proj",
            "model.layers.{}.self_attn.v_proj",
        ),
        "attn.out": ("model.layers.{}.self_attn.o_proj",),
        "mlp_norm": ("model.layers.{}.post_attention_layernorm",),
        "mlp.gate_up": ("model.layers.{}.mlp.gate_proj", "model.layers.{}.mlp.up_proj"),
        "mlp.down": ("model.layers.{}.mlp.down_proj",),
        "norm": ("model.norm",),
        "lm_head": ("lm_head",),
    },
    column=("attn.qkv", "mlp.gate_up"),
    row=("attn.out", "mlp.down"),
)
