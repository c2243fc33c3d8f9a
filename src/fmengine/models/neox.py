"""GPT-NeoX-20B and Pythia (Black et al., arXiv 2204.06745; Biderman et al., arXiv 2304.01373): architecture only."""

import math
from collections.abc import Mapping

from torch import Tensor, nn

from fmengine.config.model import ModelConfig
from fmengine.errors import UserError
from fmengine.kernels.attention import Attention
from fmengine.models.family import Family, head_dim
from fmengine.models.layers import MLP, Block, SelfAttention
from fmengine.models.resolved import known
from fmengine.models.rotary import Rotary


class NeoxAttention(SelfAttention):
    """Attention whose fused rows are head by head [q; k; v]: Hugging Face's layout, as it is."""

    def split_heads(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[B, S, rows of this shard] -> q, k and v [B, S, H, D]."""
        q, k, v = qkv.view(*qkv.shape[:-1], -1, 3 * self.head_dim).chunk(3, dim=-1)
        return q, k, v


def norm(config: ModelConfig) -> nn.LayerNorm:
    """LayerNorm with a bias."""
    return nn.LayerNorm(known(config.hidden_size), eps=known(config.layer_norm_eps))


def block(config: ModelConfig, attention: Attention, activation_checkpointing: bool) -> Block:
    """One layer.

    Raises:
        UserError: rotary_pct of a head is an odd number of entries.
    """
    width, heads = head_dim(config), known(config.num_attention_heads)
    rotary_dim = int(width * known(config.rotary_pct))
    if rotary_dim % 2 or not rotary_dim:
        raise UserError(
            f"model.rotary_pct: {config.rotary_pct} of a head of {width} is {rotary_dim} rotated entries; "
            "choose a share that gives an even number of at least 2"
        )
    attn = NeoxAttention(
        known(config.hidden_size),
        heads,
        heads,
        width,
        bias=known(config.attention_bias),
        rotary=Rotary(rotary_dim, known(config.rope_theta), config.rope_scaling),
        attention=attention,
    )
    return Block(
        norm(config),
        attn,
        norm(config),
        MLP(known(config.hidden_size), known(config.intermediate_size), act=known(config.hidden_act), bias=True),
        parallel_residual=known(config.use_parallel_residual),
        activation_checkpointing=activation_checkpointing,
    )


def initial_std(config: ModelConfig, name: str) -> float:
    """GPT-NeoX-20B's `small_init` sqrt(2 / (5 d)), and `wang_init` 2 / (L sqrt(d)) for the output projections.

    EleutherAI/gpt-neox, configs/20B.yml and megatron/model/init_functions.py; small_init is Nguyen and
    Salazar's (arXiv 1910.05895), wang_init that of Wang's mesh-transformer-jax.
    """
    width = known(config.hidden_size)
    if name.endswith(("attn.out.weight", "mlp.down.weight")):
        return 2 / (known(config.num_hidden_layers) * math.sqrt(width))
    return math.sqrt(2 / (5 * width))


def fused_rows(_config: ModelConfig) -> Mapping[str, tuple[int, ...]]:
    """No matrix is made of several of Hugging Face's: its query_key_value is taken over."""
    return {}


NEOX = Family(
    block=block,
    norm=norm,
    initial_std=initial_std,
    fused_rows=fused_rows,
    hf_modules={
        "embed": ("gpt_neox.embed_in",),
        "attn_norm": ("gpt_neox.layers.{}.input_layernorm",),
        "attn.qkv": ("gpt_neox.layers.{}.attention.query_key_value",),
        "attn.out": ("gpt_neox.layers.{}.attention.dense",),
        "mlp_norm": ("gpt_neox.layers.{}.post_attention_layernorm",),
        "mlp.up": ("gpt_neox.layers.{}.mlp.dense_h_to_4h",),
        "mlp.down": ("gpt_neox.layers.{}.mlp.dense_4h_to_h",),
        "norm": ("gpt_neox.final_layer_norm",),
        "lm_head": ("embed_out",),
    },
    column=("attn.qkv", "mlp.up"),
    row=("attn.out", "mlp.down"),
)
