"""The data-parallel engine: ZeRO 0-3, with tensor or sequence parallelism inside a replica."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from fmengine.batch import IGNORE_INDEX, Batch
from fmengine.engine.common import DeepSpeedCheckpointing, count_targets, sum_over_data
from fmengine.engine.protocol import EvalResult, StepResult
from fmengine.parallel import Topology


class DataParallelEngine:
    """`TrainEngine` over `deepspeed.DeepSpeedEngine`.

    Args:
        engine: what `deepspeed.initialize` returned for a `models.base.CausalLM`.
        topology: this rank's place.
        device: where batches go.
        learning_rate: step -> learning rate.
    """

    def __init__(
        self, engine: Any, topology: Topology, device: torch.device, learning_rate: Callable[[int], float]
    ) -> None:
        self._engine = engine
        self._topology = topology
        self._device = device
        # DeepSpeed divides summed gradients by the replicas; ZeRO-3 by every rank it cuts the weights over
        self._averaged_over = topology.data_parallel_size
        if engine.zero_optimization_stage() == 3:
            self._averaged_over *= topology.sequence_parallel_size
        names = {name: name for name, _ in engine.module.named_parameters()}
        self._state = DeepSpeedCheckpointing(engine, names, topology, learning_rate)
        self.save = self._state.save
        self.load = self._state.load
        self.restore = self._state.restore

    @property
    def step(self) -> int:
        """How many optimizer steps have been taken."""
        return self._state.step

    def train_step(self, micro_batches: Sequence[Batch]) -> StepResult:
        """One optimizer step; see `TrainEngine`."""
        self._engine.train()
        rate = self._state.apply_learning_rate()
        micro_batches = [batch.to(self._device) for batch in micro_batches]
        targets = count_targets(micro_batches, self._topology, self._device)
        scale = (self._averaged_over / targets).float()
        loss_sum = torch.zeros((), dtype=torch.float64, device=self._device)
        for batch in micro_batches:
            loss = self._forward(batch)
            loss_sum += loss.detach()
            self._engine.backward(loss * scale, scale_wrt_gas=False)
            self._engine.step()
        return StepResult(
            loss=(sum_over_data(loss_sum, self._topology) / targets).float(),
            grad_norm=self._state.grad_norm(),
            learning_rate=rate,
            target_tokens=targets.long(),
            skipped=not self._engine.was_step_applied(),
        )

    @torch.no_grad()
    def evaluate(self, micro_batches: Iterable[Batch]) -> EvalResult:
        """Loss over this rank's share of the validation samples; see `TrainEngine`."""
        self._engine.eval()
        sums = torch.zeros(2, dtype=torch.float64, device=self._device)
        for batch in micro_batches:
            batch = batch.to(self._device)
            sums[0] += self._forward(batch)
            sums[1] += (batch.targets != IGNORE_INDEX).sum()
        loss_sum, target_tokens = sum_over_data(sums, self._topology).tolist()
        return EvalResult(loss_sum=loss_sum, target_tokens=int(target_tokens))

    def _forward(self, batch: Batch) -> Tensor:
        loss: Tensor = self._engine(batch.input_ids, batch.position_ids, batch.cu_seqlens, batch.targets)
        return loss
