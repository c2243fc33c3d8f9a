"""Keys of DeepSpeed's config that FMEngine writes itself, and the key of ours that each one is."""

from typing import Any

from fmengine.config.source import Problem

OWNED = {
    "train_batch_size": "batch.global_batch_size",
    "train_micro_batch_size_per_gpu": "batch.micro_batch_size",
    "gradient_accumulation_steps": "batch.gradient_accumulation_steps",
    "elasticity": "batch.global_batch_size",
    "optimizer": "the optimizer section",
    "scheduler": "the schedule section",
    "gradient_clipping": "optimizer.gradient_clipping",
    "zero_optimization.stage": "parallel.zero_stage",
    "zero_optimization.compute_grad_norm": None,
    "tensor_parallel": "parallel.tensor_parallel_size",
    "pipeline": "parallel.pipeline_parallel_size",
    "sequence_parallel_size": "parallel.sequence_parallel_size",
    "data_parallel_size": "the parallel section",
    "fp16.enabled": "train.precision",
    "bf16.enabled": "train.precision",
    "bfloat16": "train.precision",
    "amp": "train.precision",
    "torch_autocast": "train.precision",
    "data_types.grad_accum_dtype": "train.precision",
    "activation_checkpointing": "train.activation_checkpointing",
    "checkpoint": "the checkpoint section",
    "nebula": "the checkpoint section",
    "steps_per_print": "train.log_interval",
    "zero_allow_untested_optimizer": None,
    "zero_force_ds_cpu_optimizer": None,
}
"""Dotted DeepSpeed key -> what to set instead; None where there is nothing to set."""


def owned_problems(section: dict[str, Any]) -> list[Problem]:
    """One problem for each key of the `deepspeed:` section that FMEngine owns."""
    found = []
    for theirs, ours in OWNED.items():
        key = tuple(theirs.split("."))
        if _has(section, key):
            advice = f"set {ours} instead" if ours else "leave it out"
            found.append(Problem(("deepspeed", *key), f"FMEngine sets this itself; {advice}"))
    return found


def _has(section: Any, key: tuple[str, ...]) -> bool:
    for part in key:
        if not isinstance(section, dict) or part not in section:
            return False
        section = section[part]
    return True
