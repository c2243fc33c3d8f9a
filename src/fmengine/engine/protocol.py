"""What the training loop sees of an engine; it never asks which layout is behind it."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from torch import Tensor

from fmengine.batch import Batch


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step did. Tensors stay on the device: reading them is what synchronises.

    Attributes:
        loss: float32 scalar, mean cross entropy in nats per target token of the global batch.
        grad_norm: global L2 norm before clipping, of the gradient of `loss` (float or scalar tensor).
        learning_rate: what this step's update used.
        target_tokens: int64 scalar, targets in the global batch.
        skipped: True where DeepSpeed threw the step away: fp16's loss scaler, or bf16 gradients that are not finite.
    """

    loss: Tensor
    grad_norm: Tensor | float
    learning_rate: float
    target_tokens: Tensor
    skipped: bool = False


@dataclass(frozen=True)
class EvalResult:
    """Sums over the global validation set, the same on every rank.

    Attributes:
        loss_sum: cross entropy in nats, summed over targets.
        target_tokens: how many targets that was.
    """

    loss_sum: float
    target_tokens: int

    @property
    def loss(self) -> float:
        """Mean cross entropy in nats per target token."""
        return self.loss_sum / max(self.target_tokens, 1)


class TrainEngine(Protocol):
    """One training replica. Every method is collective: all ranks call it, in the same order."""

    @property
    def step(self) -> int:
        """How many optimizer steps have been taken."""
        ...

    def train_step(self, micro_batches: Sequence[Batch]) -> StepResult:
        """One optimizer step over this rank's `gradient_accumulation_steps` micro-batches."""
        ...

    def evaluate(self, micro_batches: Iterable[Batch]) -> EvalResult:
        """Loss over this rank's share of the validation samples; every rank gives the same number of micro-batches."""
        ...

    def save(self, folder: Path) -> None:
        """Write this engine's state (every rank its own files) into an existing folder."""
        ...

    def load(self, folder: Path) -> None:
        """Take up the state that `save` wrote at the same layout, bit for bit."""
        ...
