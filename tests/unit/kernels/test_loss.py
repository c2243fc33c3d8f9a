import pytest
import torch

from fmengine.batch import IGNORE_INDEX
from fmengine.kernels.loss import cross_entropy_sum


def test_the_sum_over_targets() -> None:
    logits = torch.randn(2, 3, 5)
    targets = torch.tensor([[0, IGNORE_INDEX, 4], [2, 1, IGNORE_INDEX]])
    log_p = logits.double().log_softmax(-1)
    expected = -(log_p[0, 0, 0] + log_p[0, 2, 4] + log_p[1, 0, 2] + log_p[1, 1, 1])
    assert cross_entropy_sum(logits, shift_labels=targets).item() == pytest.approx(expected.item(), rel=1e-6)
    halved = cross_entropy_sum(logits, shift_labels=targets, num_items_in_batch=2)
    assert halved.item() == pytest.approx(expected.item() / 2, rel=1e-6)


def test_no_target_is_zero_and_has_a_zero_gradient() -> None:
    logits = torch.randn(1, 2, 5, requires_grad=True)
    loss = cross_entropy_sum(logits, shift_labels=torch.full((1, 2), IGNORE_INDEX))
    loss.backward()
    assert loss.item() == 0
    assert torch.count_nonzero(logits.grad) == 0


def test_the_softmax_is_float32() -> None:
    logits = torch.full((1, 1, 1000), 3.0, dtype=torch.bfloat16)
    loss = cross_entropy_sum(logits, shift_labels=torch.zeros(1, 1, dtype=torch.long))
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(6.907755, rel=1e-6)
