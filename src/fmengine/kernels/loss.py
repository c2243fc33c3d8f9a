"""Cross entropy, summed over the targets of a micro-batch."""

from typing import Protocol

import torch.nn.functional as F
from torch import Tensor

from fmengine.batch import IGNORE_INDEX


class LossFunction(Protocol):
    """A loss in the words of Transformers' `loss_function`, which DeepSpeed's AutoTP replaces by its own."""

    def __call__(self, logits: Tensor, *, shift_labels: Tensor, num_items_in_batch: int) -> Tensor:
        """Sum of the cross entropy over targets, divided by num_items_in_batch."""
        ...


def cross_entropy_sum(logits: Tensor, *, shift_labels: Tensor, num_items_in_batch: int = 1) -> Tensor:
    """Cross entropy in nats, with a float32 softmax.

    Args:
        logits: [B, S, V], any floating type.
        shift_labels: int64 [B, S] targets; IGNORE_INDEX where there is none.
        num_items_in_batch: what the sum is divided by; 1 leaves the sum.

    Returns:
        float32 scalar; 0 where there is no target.
    """
    loss = F.cross_entropy(
        logits.float().flatten(0, 1), shift_labels.flatten(), ignore_index=IGNORE_INDEX, reduction="sum"
    )
    return loss / num_items_in_batch if num_items_in_batch != 1 else loss
