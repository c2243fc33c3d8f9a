"""From a config to an engine: the model under its weights, the optimizer, DeepSpeed around both."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fmengine.config.batch import BatchSizes
from fmengine.config.schema import Config
from fmengine.engine.data_parallel import DataParallelEngine
from fmengine.engine.deepspeed_config import deepspeed_config, tensor_parallel_section
from fmengine.engine.optimizer import build_optimizer
from fmengine.engine.pipeline import PipelineTrainEngine, pipeline_module, stage_names
from fmengine.engine.process_group import model_parallel_unit
from fmengine.kernels.attention import Attention, AttentionBackend, select_attention
from fmengine.kernels.ulysses import ulysses_attention
from fmengine.models import registry
from fmengine.models.family import head_dim
from fmengine.models.resolved import known
from fmengine.models.tensor_plan import find_entry, split_shard
from fmengine.models.weights import WeightSource, load_weights
from fmengine.parallel import Topology
from fmengine.schedule import learning_rate

log = logging.getLogger(__name__)

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
"""`train.precision` -> what the model computes in."""

Engine = DataParallelEngine | PipelineTrainEngine


@dataclass(frozen=True)
class Build:
    """What building an engine takes; the process group is up.

    Attributes:
        config: resolved and checked.
        sizes: the solved batch triangle.
        topology: this rank's place.
        device: this rank's device.
        source: where the weights come from.
    """

    config: Config
    sizes: BatchSizes
    topology: Topology
    device: torch.device
    source: WeightSource

    @property
    def dtype(self) -> torch.dtype:
        """What the model computes in."""
        return DTYPES[self.config.train.precision]


def build(plan: Build) -> Engine:
    """The engine of this rank. Collective.

    Raises:
        UserError: an explicitly chosen kernel cannot run here.
    """
    mpu = model_parallel_unit(plan.topology)
    attention = _attention(plan, mpu)
    if plan.topology.pipeline_parallel_size > 1:
        return _pipeline(plan, attention)
    return _data_parallel(plan, attention, mpu)


def shard_splitter(plan: Build) -> Callable[[str, Tensor], Tensor]:
    """Canonical name and full tensor -> what this tensor-parallel rank holds of it."""
    entries = registry.family_of(plan.config.model).tensor_plan(plan.config.model, vocabulary_parallel=False)
    rank, size = plan.topology.tensor_rank, plan.topology.tensor_parallel_size
    if size == 1:
        return lambda _name, tensor: tensor
    return lambda name, tensor: split_shard(find_entry(entries, name), tensor, rank, size)


def _attention(plan: Build, mpu: Any) -> Attention:
    model = plan.config.model
    attention, reason = select_attention(
        AttentionBackend.AUTO,
        device=plan.device,
        dtype=plan.dtype,
        head_dim=head_dim(model),
        mask_documents=plan.config.data.mask_documents,
    )
    log.info("attention: %s", reason)
    if plan.topology.sequence_parallel_size == 1:
        return attention
    heads = known(model.num_attention_heads)
    return ulysses_attention(
        attention,
        mpu.get_sequence_parallel_group(),
        num_attention_heads=heads,
        num_key_value_heads=model.num_key_value_heads or heads,
    )


def _data_parallel(plan: Build, attention: Attention, mpu: Any) -> DataParallelEngine:
    config = plan.config
    settings = deepspeed_config(config, plan.sizes)
    if plan.topology.tensor_parallel_size > 1:
        entries = registry.family_of(config.model).tensor_plan(config.model, vocabulary_parallel=False)
        settings["tensor_parallel"] = tensor_parallel_section(entries, plan.topology.tensor_parallel_size)
    make = partial(
        registry.build,
        config.model,
        attention=attention,
        activation_checkpointing=config.train.activation_checkpointing == "full",
    )
    if config.parallel.zero_stage == 3:
        model = _sharded_model(make, plan, settings, mpu)
    else:
        with _parameters_on(plan.device, plan.dtype):
            model = make()
        load_weights(model, plan.source)
    engine = _initialize(model, dict(model.named_parameters()), settings, config, mpu)
    return DataParallelEngine(engine, plan.topology, plan.device, _rate(config))


def _sharded_model(make: Callable[[], nn.Module], plan: Build, settings: dict[str, Any], mpu: Any) -> nn.Module:
    """A model that no rank ever holds whole: each parameter is cut as it is made, and filled from rank 0."""
    import deepspeed

    group = mpu.get_sequence_data_parallel_group() if plan.topology.sequence_parallel_size > 1 else None
    # no dtype argument: given one, DeepSpeed 0.19.8 makes every parameter bf16 on a CPU; it reads the config's instead
    with deepspeed.zero.Init(data_parallel_group=group, config_dict_or_path=settings, mpu=mpu):
        model = make()
    for name, parameter in model.named_parameters():
        with deepspeed.zero.GatheredParameters(parameter, modifier_rank=0), torch.no_grad():
            if plan.topology.rank == 0:
                parameter.copy_(plan.source(name))
    return model


def _pipeline(plan: Build, attention: Attention) -> PipelineTrainEngine:
    config = plan.config
    stages = registry.stages(
        config.model,
        attention=attention,
        activation_checkpointing=config.train.activation_checkpointing == "full",
    )
    with _parameters_on(plan.device, plan.dtype):
        module = pipeline_module(stages, plan.topology, tied=known(config.model.tie_word_embeddings))
    names = stage_names(module)
    load_weights(module, lambda name: plan.source(names[name]))
    parameters = {names[name]: parameter for name, parameter in module.named_parameters()}
    engine = _initialize(module, parameters, deepspeed_config(config, plan.sizes), config, None)
    return PipelineTrainEngine(engine, names, plan.topology, plan.device, _rate(config))


def _initialize(
    model: nn.Module, parameters: dict[str, nn.Parameter], settings: dict[str, Any], config: Config, mpu: Any
) -> Any:
    import deepspeed

    optimizer = build_optimizer(parameters.items(), config.optimizer, registry.family_of(config.model).decays)
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, config=settings, mpu=mpu, dist_init_required=False
    )
    return engine


def _rate(config: Config) -> Callable[[int], float]:
    return partial(
        learning_rate, steps=config.train.steps, peak=config.optimizer.learning_rate, schedule=config.schedule
    )


@contextmanager
def _parameters_on(device: torch.device, dtype: torch.dtype) -> Iterator[None]:
    """New parameters are made on `device` in `dtype`, so that the host never holds a whole model."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            yield
    finally:
        torch.set_default_dtype(before)
