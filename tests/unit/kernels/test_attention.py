import itertools
import math

import pytest
import torch
from torch import Tensor

from fmengine.errors import UserError
from fmengine.kernels.attention import (
    AttentionBackend,
    dense_attention,
    document_mask,
    select_attention,
    varlen_attention,
)

CPU = torch.device("cpu")


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


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_dense_attends_inside_documents_only(kv_heads: int) -> None:
    q, k, v = inputs(kv_heads)
    cu_seqlens = torch.tensor([0, 5, 6, 16, 32, 32, 32], dtype=torch.int32)
    out = dense_attention(mask_documents=True)(q, k, v, cu_seqlens)
    expected = reference(q, k, v, cu_seqlens)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-6)
    weights = torch.randn(out.shape)
    ours = torch.autograd.grad((out * weights).sum(), (q, k, v))
    theirs = torch.autograd.grad((expected * weights).sum(), (q, k, v))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_dense_without_masking_takes_each_row_whole() -> None:
    q, k, v = inputs(2)
    rows = torch.tensor([0, 16, 32], dtype=torch.int32)
    out = dense_attention(mask_documents=False)(q, k, v, rows)
    torch.testing.assert_close(out.double(), reference(q, k, v, rows), rtol=1e-5, atol=1e-6)


def test_the_mask_by_hand() -> None:
    mask = document_mask(torch.tensor([0, 2, 3, 6, 6], dtype=torch.int32), rows=2, length=3)
    first = [[1, 0, 0], [1, 1, 0], [0, 0, 1]]
    second = [[1, 0, 0], [1, 1, 0], [1, 1, 1]]
    assert mask.int().tolist() == [[first], [second]]


def test_auto_says_why() -> None:
    options = {"device": CPU, "dtype": torch.float32, "head_dim": 64}
    _, reason = select_attention(AttentionBackend.AUTO, mask_documents=True, **options)
    assert reason == "dense: varlen cannot run (it needs a CUDA device, not cpu)"
    _, reason = select_attention(AttentionBackend.AUTO, mask_documents=False, **options)
    assert reason.startswith("dense: each row is one document")
    _, reason = select_attention(AttentionBackend("dense"), mask_documents=True, **options)
    assert reason == "dense: asked for"


def test_a_backend_that_cannot_run_is_an_error() -> None:
    with pytest.raises(UserError, match="varlen cannot run: it needs a CUDA device, not cpu"):
        select_attention(AttentionBackend.VARLEN, device=CPU, dtype=torch.bfloat16, head_dim=64, mask_documents=True)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="varlen attention needs a GPU")
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_varlen_equals_the_reference(kv_heads: int) -> None:
    q, k, v = (x.detach().cuda().bfloat16().requires_grad_() for x in inputs(kv_heads, rows=2, length=128, width=64))
    cu_seqlens = torch.tensor([0, 5, 6, 128, 256, 256, 256], dtype=torch.int32, device="cuda")
    out = varlen_attention()(q, k, v, cu_seqlens)
    expected = reference(q, k, v, cu_seqlens)
    torch.testing.assert_close(out.double(), expected, rtol=2e-2, atol=2e-2)
    weights = torch.randn(out.shape, device="cuda")
    ours = torch.autograd.grad((out * weights).sum(), (q, k, v))
    theirs = torch.autograd.grad((expected * weights).sum(), (q, k, v))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=5e-2, atol=5e-2)
