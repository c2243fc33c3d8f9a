"""The variable-length attention against a float64 reference, forward and backward."""

import pytest
import torch

from fmengine.kernels.attention import varlen_attention
from support.attention import inputs, reference


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
