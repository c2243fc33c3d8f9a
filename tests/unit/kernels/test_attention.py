import pytest
import torch

from fmengine.errors import UserError
from fmengine.kernels.attention import (
    AttentionBackend,
    dense_attention,
    document_mask,
    select_attention,
)
from support.attention import inputs, reference

CPU = torch.device("cpu")


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
