"""A two-layer language model of the kind that we train, for DeepSpeed's tensor parallelism.

Fused QKV with grouped queries, fused gate/up, an untied head. What AutoTP wants of a model is marked.
"""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

VOCABULARY, WIDTH, HEADS, KV_HEADS, HEAD_DIM, FEED_FORWARD = 20, 16, 4, 2, 4, 24


class Attention(nn.Module):
    """Causal attention whose head counts follow its weight's shape, which AutoTP shards."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, (HEADS + 2 * KV_HEADS) * HEAD_DIM, bias=True)
        self.out = nn.Linear(HEADS * HEAD_DIM, WIDTH, bias=False)
        self.num_heads = self.heads_of_model = HEADS  # nothing reads them: to see what AutoTP does to attributes

    def forward(self, hidden: Tensor) -> Tensor:
        """Hidden [B, S, WIDTH] to the same shape."""
        qkv = self.qkv(hidden)
        # From the activation's width: the whole model's counts are wrong on a shard.
        kv_heads = qkv.shape[-1] // HEAD_DIM // (HEADS // KV_HEADS + 2)
        heads = kv_heads * (HEADS // KV_HEADS)
        qkv = qkv.view(*hidden.shape[:2], heads + 2 * kv_heads, HEAD_DIM).transpose(1, 2)
        query, key, value = qkv.split([heads, kv_heads, kv_heads], dim=1)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        projected: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return projected


class GatedMlp(nn.Module):
    """SwiGLU with gate and up in one matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up = nn.Linear(WIDTH, 2 * FEED_FORWARD, bias=False)
        self.down = nn.Linear(FEED_FORWARD, WIDTH, bias=True)

    def forward(self, hidden: Tensor) -> Tensor:
        """Hidden [B, S, WIDTH] to the same shape."""
        gate, up = self.gate_up(hidden).chunk(2, dim=-1)
        projected: Tensor = self.down(functional.silu(gate) * up)
        return projected


class Block(nn.Module):
    """Pre-norm block."""

    def __init__(self) -> None:
        super().__init__()
        self.attn_norm, self.attn = nn.LayerNorm(WIDTH), Attention()
        self.mlp_norm, self.mlp = nn.LayerNorm(WIDTH), GatedMlp()

    def forward(self, hidden: Tensor) -> Tensor:
        """Hidden [B, S, WIDTH] to the same shape."""
        hidden = hidden + self.attn(self.attn_norm(hidden))
        added: Tensor = hidden + self.mlp(self.mlp_norm(hidden))
        return added


class TinyLM(nn.Module):
    """The forward returns the SUM of the cross entropy over the targets, float32."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        # AutoTP splits along key/value heads where this is known.
        self.config = SimpleNamespace(num_key_value_heads=KV_HEADS, num_attention_heads=HEADS, hidden_size=WIDTH)

    def forward(self, input_ids: Tensor, targets: Tensor) -> Tensor:
        """Ids and targets [B, S] to a scalar."""
        hidden = self.embed(input_ids)
        for layer in self.layers:
            hidden = layer(hidden)
        logits = self.lm_head(self.norm(hidden)).float()
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")


def tiny_lm(seed: int = 0) -> TinyLM:
    """A float32 TinyLM whose weights depend on the seed alone."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return TinyLM()


def tokens(step: int, size: int = 2, length: int = 6) -> tuple[Tensor, Tensor]:
    """Input ids and targets [size, length] of one step, the same on every rank."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(VOCABULARY, (size, length + 1), generator=generator)
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def tensor_parallel_section(size: int) -> dict[str, Any]:
    """The `tensor_parallel` section that shards TinyLM right, the head replicated.

    `use_default_specs: false` leaves whatever no pattern names replicated. A pattern is matched (re.match)
    against the weight's full name; the bias goes with it. `shape` cuts a fused matrix into its parts before
    sharding: [[q rows, k rows, v rows], -1] for QKV, [2, -1] for two equal parts.
    """
    query, key_value = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    column, row = {"partition_type": "column", "partition_dim": 0}, {"partition_type": "row"}
    specs = [
        {"patterns": [r".*\.attn\.qkv\.weight$"], **column, "shape": [[query, key_value, key_value], -1]},
        {"patterns": [r".*\.mlp\.gate_up\.weight$"], **column, "shape": [2, -1]},
        {"patterns": [r".*\.attn\.out\.weight$", r".*\.mlp\.down\.weight$"], **row},
    ]
    return {"autotp_size": size, "partition_config": {"use_default_specs": False, "layer_specs": specs}}
