"""The sections of a training config; reading and checking them is `config.load`'s work."""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from fmengine.config.model import FilePath, ModelConfig, Section


class RunConfig(Section):
    """Where a run lives."""

    dir: FilePath = Field(default=Path("runs/default"), description="run folder: config, checkpoints, logs, metrics")
    seed: int = Field(default=1234, ge=0, lt=2**63, description="fixes the initial weights and the order of the data")


class DataConfig(Section):
    """Tokens to train on: Megatron .bin/.idx pairs, named by their common prefix."""

    train: FilePath | None = Field(
        default=None,
        description="prefix of the training .bin/.idx; none: the Python standard library's source, prepared at start",
    )
    validation: FilePath | None = Field(default=None, description="prefix of the validation .bin/.idx")
    validation_fraction: float = Field(
        default=0.0,
        ge=0,
        lt=0.5,
        description="share of the training documents held out (at their end) when validation is not given",
    )
    tokenizer: FilePath | None = Field(default=None, description="folder with tokenizer.json, or the file itself")
    sequence_length: int = Field(default=2048, ge=2, description="tokens in a sample")
    mask_documents: bool = Field(default=True, description="packed documents do not attend to one another")


class BatchConfig(Section):
    """The batch triangle: global = micro x accumulation x data-parallel size; give any two, or global alone."""

    global_batch_size: int | None = Field(default=None, gt=0, description="samples in an optimizer step")
    micro_batch_size: int | None = Field(default=None, gt=0, description="samples in one forward pass of one replica")
    gradient_accumulation_steps: int | None = Field(
        default=None, gt=0, description="micro-batches a replica runs in a step"
    )


class ParallelConfig(Section):
    """Layout: ZeRO stage and the sizes of the model-parallel axes; data parallelism takes the rest."""

    zero_stage: Literal[0, 1, 2, 3] = Field(
        default=1, description="what ZeRO shards: 1 optimizer, 2 and gradients, 3 and weights"
    )
    tensor_parallel_size: int = Field(default=1, ge=1, description="ranks that split every matrix")
    pipeline_parallel_size: int = Field(default=1, ge=1, description="stages that split the layers")
    sequence_parallel_size: int = Field(default=1, ge=1, description="ranks that split the sequence (Ulysses)")


Beta = Annotated[float, Field(ge=0, lt=1)]
"""Decay of a moment a step."""


class OptimizerConfig(Section):
    """AdamW with decoupled weight decay; norms, biases and embeddings are not decayed."""

    learning_rate: float = Field(default=3e-4, gt=0, le=1000, description="peak learning rate")
    betas: tuple[Beta, Beta] = Field(default=(0.9, 0.95), description="decay of the two moments")
    eps: float = Field(default=1e-8, gt=0, le=1, description="added to the root of the second moment")
    weight_decay: float = Field(default=0.1, ge=0, description="decay of the matrices")
    gradient_clipping: float = Field(
        default=1.0, ge=0, description="largest global gradient norm; 0 turns clipping off"
    )


class ScheduleConfig(Section):
    """Learning rate over the steps: linear warm-up, then a shape, down to min_ratio of the peak."""

    shape: Literal["cosine", "linear", "wsd", "constant"] = Field(
        default="cosine", description="wsd: constant, then a decay over the last decay_steps"
    )
    warmup_steps: int = Field(default=0, ge=0, description="steps of linear warm-up from 0")
    decay_steps: int | None = Field(
        default=None, gt=0, description="wsd: length of the last decay; by default a tenth of the steps"
    )
    min_ratio: float = Field(default=0.1, ge=0, le=1, description="final learning rate over the peak")


class TrainConfig(Section):
    """The loop."""

    steps: int = Field(default=1000, gt=0, description="optimizer steps in the whole run")
    precision: Literal["bf16", "fp16", "fp32"] = Field(
        default="bf16",
        description="compute; weights and moments are fp32 beside it, gradients accumulate in fp32 (bf16)",
    )
    activation_checkpointing: Literal["none", "full"] = Field(
        default="none", description="full: recompute each block in the backward pass"
    )
    log_interval: int = Field(default=10, gt=0, description="steps between log lines; metrics.jsonl has them all")
    eval_interval: int = Field(
        default=0, ge=0, description="steps between validations; 0: only before the first step and after the last"
    )
    eval_samples: int = Field(default=512, gt=0, description="validation samples at most")


class CheckpointConfig(Section):
    """When state is written and how much of it stays."""

    interval: int = Field(default=500, ge=0, description="steps between checkpoints; 0: only at the end")
    keep: int = Field(
        default=2, ge=1, description="whole checkpoints that stay; older ones go after a newer one is whole"
    )


class Config(Section):
    """A whole training config."""

    version: Literal[1] = Field(default=1, description="format of this file")
    run: RunConfig = RunConfig()
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    batch: BatchConfig = BatchConfig()
    parallel: ParallelConfig = ParallelConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    train: TrainConfig = TrainConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    deepspeed: dict[str, Any] = Field(
        default_factory=dict, description="passed to DeepSpeed as it is; a key that FMEngine owns is refused"
    )
