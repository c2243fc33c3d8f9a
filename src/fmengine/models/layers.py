"""The parts that blocks are made of.

No attribute may have a name that AutoTP rewrites on modules (`num_heads`, `hidden_size`, ...), and no size
that tensor parallelism divides is stored: it is read off the shard.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fmengine.kernels.attention import Attention
from fmengine.models.rotary import Rotary

_gelu_tanh = partial(F.gelu, approximate="tanh")

ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    # three spellings of one approximation (Transformers' activations.py)
    "gelu_new": _gelu_tanh,
    "gelu_fast": _gelu_tanh,
    "gelu_pytorch_tanh": _gelu_tanh,
}
"""Hugging Face's `hidden_act` -> function."""


class SelfAttention(nn.Module, ABC):
    """Fused QKV projection, rotation, attention, output projection.

    Args:
        width: of the residual stream.
        heads: query heads.
        key_value_heads: key and value heads.
        head_dim: width of a head.
        bias: whether both projections have one.
        rotary: rotates queries and keys.
        attention: attends.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        key_value_heads: int,
        head_dim: int,
        *,
        bias: bool,
        rotary: Rotary,
        attention: Attention,
    ) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.queries_per_group = heads // key_value_heads
        self.rotary = rotary
        self.attention = attention
        self.qkv = nn.Linear(width, (heads + 2 * key_value_heads) * head_dim, bias=bias)
        self.out = nn.Linear(heads * head_dim, width, bias=bias)

    @abstractmethod
    def split_heads(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[B, S, rows of this shard] -> q [B, S, H, D], k and v [B, S, KV, D], with the shard's own H and KV."""

    def forward(self, hidden: Tensor, position_ids: Tensor, cu_seqlens: Tensor) -> Tensor:
        """[B, S, width] -> [B, S, width]."""
        q, k, v = self.split_heads(self.qkv(hidden))
        q, k = self.rotary(q, k, position_ids)
        result: Tensor = self.out(self.attention(q, k, v, cu_seqlens).flatten(2))
        return result


class MLP(nn.Module):
    """down(act(up(x)))."""

    def __init__(self, width: int, inner: int, *, act: str, bias: bool) -> None:
        super().__init__()
        self.up = nn.Linear(width, inner, bias=bias)
        self.down = nn.Linear(inner, width, bias=bias)
        self.act = ACTIVATIONS[act]

    def forward(self, hidden: Tensor) -> Tensor:
        """[B, S, width] -> [B, S, width]."""
        result: Tensor = self.down(self.act(self.up(hidden)))
        return result


class GatedMLP(nn.Module):
    """down(act(gate(x)) * up(x)) (Shazeer, arXiv 2002.05202), gate and up in one matrix, rows [gate; up]."""

    def __init__(self, width: int, inner: int, *, act: str, bias: bool) -> None:
        super().__init__()
        self.gate_up = nn.Linear(width, 2 * inner, bias=bias)
        self.down = nn.Linear(inner, width, bias=bias)
        self.act = ACTIVATIONS[act]

    def forward(self, hidden: Tensor) -> Tensor:
        """[B, S, width] -> [B, S, width]."""
        gate, up = self.gate_up(hidden).chunk(2, dim=-1)
        result: Tensor = self.down(self.act(gate) * up)
        return result


class Block(nn.Module):
    """One transformer layer, pre-norm.

    Args:
        attn_norm: norm before the attention.
        attn: attention.
        mlp_norm: norm before the MLP.
        mlp: MLP.
        parallel_residual: attention and MLP read the same input (Wang and Komatsuzaki, GPT-J).
        activation_checkpointing: keep only the input and recompute the block in the backward pass.
    """

    def __init__(
        self,
        attn_norm: nn.Module,
        attn: SelfAttention,
        mlp_norm: nn.Module,
        mlp: nn.Module,
        *,
        parallel_residual: bool,
        activation_checkpointing: bool,
    ) -> None:
        super().__init__()
        self.attn_norm = attn_norm
        self.attn = attn
        self.mlp_norm = mlp_norm
        self.mlp = mlp
        self.parallel_residual = parallel_residual
        self.activation_checkpointing = activation_checkpointing

    def forward(self, hidden: Tensor, position_ids: Tensor, cu_seqlens: Tensor) -> Tensor:
        """Hidden state [B, S, width] to the next one; position_ids int64 [B, S], cu_seqlens int32 [N + 1]."""
        if not (self.activation_checkpointing and torch.is_grad_enabled()):
            return self._forward(hidden, position_ids, cu_seqlens)
        result: Tensor = checkpoint(
            self._forward,
            hidden,
            position_ids,
            cu_seqlens,
            use_reentrant=False,
            preserve_rng_state=False,  # nothing here is random
        )
        return result

    def _forward(self, hidden: Tensor, position_ids: Tensor, cu_seqlens: Tensor) -> Tensor:
        attended: Tensor = hidden + self.attn(self.attn_norm(hidden), position_ids, cu_seqlens)
        mlp_input = hidden if self.parallel_residual else attended
        result: Tensor = attended + self.mlp(self.mlp_norm(mlp_input))
        return result
