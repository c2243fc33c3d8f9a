"""Ulysses sequence parallelism: ranks swap slices of the sequence for slices of the heads around attention.

Jacobs et al., DeepSpeed Ulysses, arXiv 2309.14509.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fmengine.errors import UserError
from fmengine.kernels.attention import Attention


def ulysses_attention(
    attention: Attention, group: dist.ProcessGroup, *, num_attention_heads: int, num_key_value_heads: int
) -> Attention:
    """`attention` for q, k and v that hold this rank's S / sp positions and all heads.

    The wrapped function sees all S positions and 1 / sp of the heads. Key and value heads that are
    fewer than the ranks are repeated, so that each rank gets the one its query heads read.

    Args:
        attention: works on whole sequences.
        group: the sp ranks that share a sequence, in the order of their slices.
        num_attention_heads: query heads of the model.
        num_key_value_heads: key and value heads of the model.

    Raises:
        UserError: the heads cannot be shared out evenly.
    """
    size = dist.get_world_size(group)
    if num_attention_heads % size:
        raise UserError(
            f"parallel.sequence_parallel_size: {size} does not divide the {num_attention_heads} attention heads; "
            "choose a divisor"
        )
    if num_key_value_heads % size and size % num_key_value_heads:
        raise UserError(
            f"parallel.sequence_parallel_size: {size} neither divides the {num_key_value_heads} key-value heads "
            "nor is a multiple of them; choose one that is"
        )
    repeats = max(size // num_key_value_heads, 1)

    def attend(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor) -> Tensor:
        if repeats > 1:
            k, v = (x.repeat_interleave(repeats, dim=2) for x in (k, v))
        q, k, v = (_sequence_to_heads(x, group, size) for x in (q, k, v))
        return _heads_to_sequence(attention(q, k, v, cu_seqlens), group, size)

    return attend


def _sequence_to_heads(x: Tensor, group: dist.ProcessGroup, size: int) -> Tensor:
    # [B, S/sp, H, D] -> [B, S, H/sp, D]
    batch, length, heads, width = x.shape
    by_rank = x.reshape(batch, length, size, heads // size, width).movedim(2, 0)
    return _all_to_all(by_rank, group).movedim(0, 1).flatten(1, 2)


def _heads_to_sequence(x: Tensor, group: dist.ProcessGroup, size: int) -> Tensor:
    # [B, S, H/sp, D] -> [B, S/sp, H, D]
    batch, length, heads, width = x.shape
    by_rank = x.reshape(batch, size, length // size, heads, width).movedim(1, 0)
    return _all_to_all(by_rank, group).movedim(0, 2).flatten(2, 3)


def _all_to_all(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    result: Tensor = _AllToAll.apply(x, group)  # type: ignore[no-untyped-call]
    return result


class _AllToAll(torch.autograd.Function):
    """Slice i of dimension 0 goes to rank i; it is its own adjoint."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        x = x.contiguous()
        received = torch.empty_like(x)
        dist.all_to_all_single(received, x, group=group)
        return received

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _all_to_all(gradients[0], ctx.group), None
