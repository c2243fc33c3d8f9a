"""A plain reference for attention inside documents, and random inputs."""

import itertools
import math

import torch
from torch import Tensor


def reference(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Softmax attention, document by document, in float64."""
    rows, length, heads, width = q.shape
    q, k, v = (x.double().flatten(0, 1) for x in (q, k, v))
    k, v = (x.repeat_interleave(heads // x.shape[1], dim=1) for x in (k, v))
    out = torch.zeros_like(q)
    bounds = cu_seqlens.tolist()
    for start, end in itertools.pairwise(bounds):
        scores = torch.einsum("qhd,khd->hqk", q[start:end], k[start:end]) / math.sqrt(width)
        later = torch.ones(end - start, end - start, dtype=torch.bool, device=q.device).triu(1)
        weights = scores.masked_fill(later, -torch.inf).softmax(-1)
        out[start:end] = torch.einsum("hqk,khd->qhd", weights, v[start:end])
    return out.view(rows, length, heads, width)


def inputs(kv_heads: int, rows: int = 2, length: int = 16, width: int = 8) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(rows, length, heads, width) for heads in (4, kv_heads, kv_heads)]
    q, k, v = (torch.randn(shape, generator=generator).requires_grad_() for shape in shapes)
    return q, k, v
