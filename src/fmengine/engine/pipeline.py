"""The pipeline engine: stages through DeepSpeed's `PipelineModule`, ZeRO 0 or 1 beside it."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import redirect_stdout
from functools import partial
from io import StringIO
from typing import Any

import torch
from torch import Tensor, nn

from fmengine.batch import IGNORE_INDEX, Batch
from fmengine.engine.common import DeepSpeedCheckpointing, count_targets, sum_over_data
from fmengine.engine.protocol import EvalResult, StepResult
from fmengine.models.base import Stage
from fmengine.parallel import Topology


class PipelineTrainEngine:
    """`TrainEngine` over `deepspeed.PipelineEngine`.

    Args:
        engine: what `deepspeed.initialize` returned for `pipeline_module`'s module.
        names: DeepSpeed's parameter names -> canonical ones, of this stage.
        topology: this rank's place.
        device: where batches go.
        learning_rate: step -> learning rate.
    """

    def __init__(
        self,
        engine: Any,
        names: dict[str, str],
        topology: Topology,
        device: torch.device,
        learning_rate: Callable[[int], float],
    ) -> None:
        self._engine = engine
        self._topology = topology
        self._device = device
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
        rate = self._state.apply_learning_rate()
        micro_batches = [batch.to(self._device) for batch in micro_batches]
        targets = count_targets(micro_batches, self._topology, self._device)
        # the last stage divides each loss by the accumulation steps, ZeRO averages over the replicas: undo both
        factor = (self._topology.data_parallel_size * len(micro_batches) / targets).float()
        loss = self._engine.train_batch(_pipeline_inputs(micro_batches, factor))
        return StepResult(
            loss=loss.float(),
            grad_norm=self._state.grad_norm(),
            learning_rate=rate,
            target_tokens=targets.long(),
            skipped=not self._engine.was_step_applied(),
        )

    def evaluate(self, micro_batches: Iterable[Batch]) -> EvalResult:
        """Loss over this replica's share of the validation samples; see `TrainEngine`."""
        batches = [batch.to(self._device) for batch in micro_batches]
        if not batches:
            return EvalResult(loss_sum=0.0, target_tokens=0)
        factor = torch.ones((), device=self._device)
        inputs = _pipeline_inputs(batches, factor)
        mean = self._engine.eval_batch(inputs, num_micro_batches=len(batches), bcast_loss=True)
        tokens = torch.stack([(batch.targets != IGNORE_INDEX).sum() for batch in batches]).sum().double()
        # eval_batch averages over micro-batches and replicas
        loss_sum = float(mean) * len(batches) * self._topology.data_parallel_size
        return EvalResult(loss_sum=loss_sum, target_tokens=int(sum_over_data(tokens, self._topology)))


def pipeline_module(stages: Sequence[partial[Stage]], topology: Topology, *, tied: bool) -> nn.Module:
    """DeepSpeed's module that holds this rank's part of the layers.

    Args:
        stages: `models.registry.stages`: embedding, blocks, head; only this rank's are built.
        topology: sizes of the axes.
        tied: the head uses the embedding's weight, which DeepSpeed then keeps equal on both ends.
    """
    from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
    from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology

    axes = PipeModelDataParallelTopology(
        num_pp=topology.pipeline_parallel_size, num_dp=topology.data_parallel_size, num_mp=topology.tensor_parallel_size
    )
    layers = [LayerSpec(stage.func, *stage.args, **stage.keywords) for stage in stages]
    if tied:
        for end in (0, -1):
            stage = stages[end]
            layers[end] = TiedLayerSpec(
                "embed", stage.func, *stage.args, tied_weight_attr="embed.weight", **stage.keywords
            )
    # DeepSpeed prints its partition to the standard output, which is for our own lines
    with redirect_stdout(StringIO()):
        # blocks are shared evenly; the embedding goes with the first of them, the head with the last
        module: nn.Module = PipelineModule(
            layers=layers, topology=axes, loss_fn=scaled_loss, partition_method="type:BlockStage"
        )
    _mark_parameters(module)
    return module


def _mark_parameters(module: nn.Module) -> None:
    for name, parameter in module.named_parameters():
        marks: Any = parameter
        # DeepSpeed marks a tied layer's norm as a copy too, and would leave it out of the gradient norm
        marks.ds_pipe_replicated = marks.ds_pipe_replicated and name.endswith("embed.weight")
        # without this mark its fp32 clipping counts the first stage alone
        marks.model_parallel = not marks.ds_pipe_replicated


def stage_names(module: nn.Module) -> dict[str, str]:
    """DeepSpeed's names of a pipeline module's parameters (layer number or tied key first) -> canonical names."""
    return {name: name.removeprefix("tied_modules.").split(".", 1)[1] for name, _ in module.named_parameters()}


def scaled_loss(loss_sum: Tensor, factor: Tensor) -> Tensor:
    """The last stage's loss: the head has summed the cross entropy, the factor travels as the label."""
    return loss_sum * factor


def _pipeline_inputs(batches: Sequence[Batch], factor: Tensor) -> Iterator[tuple[tuple[Tensor, ...], Tensor]]:
    for batch in batches:
        yield (batch.input_ids, batch.targets, batch.position_ids, batch.cu_seqlens), factor
