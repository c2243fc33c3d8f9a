"""What both engines share around a DeepSpeed engine: learning rate, norms, saving and loading."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fmengine.batch import IGNORE_INDEX, Batch
from fmengine.checkpoint.durable import TAG, save_deepspeed
from fmengine.checkpoint.reader import ParameterState
from fmengine.engine.restore import restore_parameters
from fmengine.errors import UserError
from fmengine.parallel import Topology


class DeepSpeedCheckpointing:
    """Saving, loading and the learning rate of one DeepSpeed engine.

    Args:
        engine: what `deepspeed.initialize` returned.
        names: DeepSpeed's parameter name -> canonical name, for every parameter of this rank.
        topology: this rank's place.
        learning_rate: step (from 0) -> learning rate of that step's update.
    """

    def __init__(
        self, engine: Any, names: dict[str, str], topology: Topology, learning_rate: Callable[[int], float]
    ) -> None:
        self._engine = engine
        self._names = names
        self._topology = topology
        self._learning_rate = learning_rate
        self._zero0_norm: Tensor | None = None
        # at ZeRO-0 in fp32 DeepSpeed clips and forgets the norm; its own function returns it
        if not engine.zero_optimization() and not engine.bfloat16_enabled() and not engine.fp16_enabled():
            engine.clip_fp32_gradients = self._clip_and_keep_norm
            if not engine.gradient_clipping():  # and does not call that where clipping is off
                engine.optimizer.register_step_pre_hook(lambda *_: self._clip_and_keep_norm())

    @property
    def step(self) -> int:
        """How many optimizer steps have been taken."""
        return int(self._engine.global_steps)

    def parameters(self) -> dict[str, nn.Parameter]:
        """The parameters this rank holds (its tensor-parallel shards) by canonical name."""
        return {self._names[name]: parameter for name, parameter in self._engine.module.named_parameters()}

    def save(self, folder: Path) -> None:
        """Write DeepSpeed's files and our table of names into `folder`; see `checkpoint.durable`."""
        save_deepspeed(self._engine, folder, self._names)

    def load(self, folder: Path) -> None:
        """Take up what `save` wrote at the same layout.

        Raises:
            UserError: there is none.
        """
        if not (folder / TAG).is_dir():
            raise UserError(
                f"{folder / TAG}: no such folder, so no state to go on from; resume from another checkpoint"
            )
        self._engine.load_checkpoint(str(folder), tag=TAG, load_lr_scheduler_states=False)

    def restore(self, state: ParameterState, split: Callable[[str, Tensor], Tensor], step: int) -> None:
        """Take up per-parameter state that any layout wrote.

        Args:
            state: full tensors by canonical name, such as a `checkpoint.store.ParameterStore`.
            split: canonical name and full tensor -> this tensor-parallel rank's shard.
            step: optimizer steps of the run, those that were thrown away included.
        """
        restore_parameters(self._engine, self.parameters(), state, split, step)

    def apply_learning_rate(self) -> float:
        """Set and return the learning rate of the coming update."""
        rate = self._learning_rate(self.step)
        for group in self._engine.optimizer.param_groups:
            group["lr"] = rate
        return rate

    def grad_norm(self) -> Tensor | float:
        """Global gradient norm before clipping, of the step just taken."""
        norm = self._zero0_norm if self._zero0_norm is not None else self._engine.get_global_grad_norm()
        return float("nan") if norm is None else norm

    def _clip_and_keep_norm(self) -> None:
        from deepspeed.runtime.utils import clip_grad_norm_

        largest = self._engine.gradient_clipping() or math.inf
        self._zero0_norm = clip_grad_norm_(self._engine.module.parameters(), largest, mpu=self._engine.mpu)


def count_targets(micro_batches: Sequence[Batch], topology: Topology, device: torch.device) -> Tensor:
    """Target tokens of the global batch, counted on the device with one all-reduce and no synchronisation.

    Ranks of one tensor or pipeline group hold the same batch, so the sum over the world counts each target
    tensor x pipeline times; sequence ranks hold different slices.

    Returns:
        float64 scalar on `device`, at least 1 so that a step without targets divides by no zero.
    """
    local = sum((batch.targets != IGNORE_INDEX).sum() for batch in micro_batches)
    count = torch.as_tensor(local, device=device).double()
    return (sum_over_data(count, topology)).clamp_(min=1)


def sum_over_data(value: Tensor, topology: Topology) -> Tensor:
    """Sum of a float64 tensor over the ranks that hold different data; the same on every rank."""
    dist.all_reduce(value)
    return value / (topology.tensor_parallel_size * topology.pipeline_parallel_size)
