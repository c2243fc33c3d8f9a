"""Causal attention inside each packed document: the backends, chosen once when the model is built."""

import inspect
from collections.abc import Callable
from enum import StrEnum
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fmengine.errors import UserError

Attention = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""q [B, S, H, D], k and v [B, S, KV, D] (H a multiple of KV), cu_seqlens int32 [N + 1] -> [B, S, H, D]."""


class AttentionBackend(StrEnum):
    """Which implementation runs; `auto` takes the fastest that can."""

    AUTO = "auto"
    DENSE = "dense"
    VARLEN = "varlen"


def select_attention(
    backend: AttentionBackend, *, device: torch.device, dtype: torch.dtype, head_dim: int, mask_documents: bool
) -> tuple[Attention, str]:
    """The attention function and, for the log, why it was chosen.

    Args:
        backend: what the user asked for.
        device: where the model runs.
        dtype: what it computes in.
        head_dim: width of a head.
        mask_documents: whether packed documents are kept apart; if not, each row is one document.

    Raises:
        UserError: an explicit backend cannot run here.
    """
    obstacle = varlen_obstacle(device, dtype, head_dim)
    if backend is AttentionBackend.VARLEN:
        if obstacle:
            raise UserError(f"attention: varlen cannot run: {obstacle}; use auto or dense")
        return varlen_attention(), "varlen: asked for"
    if backend is AttentionBackend.DENSE:
        return dense_attention(mask_documents), "dense: asked for"
    if not mask_documents:
        return dense_attention(mask_documents), "dense: each row is one document, so SDPA's causal kernels serve"
    if obstacle:
        return dense_attention(mask_documents), f"dense: varlen cannot run ({obstacle})"
    return varlen_attention(), "varlen: packed documents on CUDA"


def dense_attention(mask_documents: bool) -> Attention:
    """SDPA on whole rows; with document masking under an explicit block-diagonal mask of B x S x S."""

    def attend(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor) -> Tensor:
        mask = document_mask(cu_seqlens, q.shape[0], q.shape[1]) if mask_documents else None
        out = F.scaled_dot_product_attention(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            attn_mask=mask,
            is_causal=mask is None,
            enable_gqa=q.shape[2] != k.shape[2],
        )
        return out.transpose(1, 2)

    return attend


def document_mask(cu_seqlens: Tensor, rows: int, length: int) -> Tensor:
    """True where a query may look: the same document, not later. bool [B, 1, S, S], made without synchronising.

    Args:
        cu_seqlens: int32 [N + 1] bounds of the documents in the B x S tokens; empty documents may follow.
        rows: B.
        length: S.
    """
    tokens = torch.arange(rows * length, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    document = torch.searchsorted(cu_seqlens, tokens, right=True).view(rows, length)
    same = document[:, :, None] == document[:, None, :]
    return same.tril().unsqueeze(1)


def varlen_attention() -> Attention:
    """`torch.nn.attention.varlen` (FlashAttention) over the flattened tokens; no mask is ever made."""
    from torch.nn.attention.varlen import varlen_attn

    # torch 2.10 has is_causal where later versions have window_size, and no enable_gqa
    run: Callable[..., Any] = varlen_attn
    parameters = inspect.signature(varlen_attn).parameters
    causal: dict[str, Any] = {"window_size": (-1, 0)} if "window_size" in parameters else {"is_causal": True}
    takes_groups = "enable_gqa" in parameters

    def attend(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor) -> Tensor:
        length, group = q.shape[1], q.shape[2] // k.shape[2]
        options = dict(causal)
        if takes_groups:
            options["enable_gqa"] = group > 1
        elif group > 1:
            k, v = (x.repeat_interleave(group, dim=2) for x in (k, v))
        # the longest document is at most a row, so nothing is read back to size the launch
        out: Tensor = run(
            q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), cu_seqlens, cu_seqlens, length, length, **options
        )
        return out.view(q.shape)

    return attend


def varlen_obstacle(device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """Why `varlen_attention` cannot run, or None.

    The limits are FlashAttention 2's in torch: bf16 or fp16, compute capability 8.0, heads of at most 256
    and a multiple of 8 (its check in aten/src/ATen/native/transformers/cuda/flash_attn).
    """
    if device.type != "cuda":
        return f"it needs a CUDA device, not {device.type}"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"it needs bf16 or fp16, not {str(dtype).removeprefix('torch.')}"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "it needs an Ampere GPU (compute capability 8.0) or newer"
    if head_dim > 256 or head_dim % 8:
        return f"it needs a head_dim of at most 256 that is a multiple of 8, not {head_dim}"
    return None
