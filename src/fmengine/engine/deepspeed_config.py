"""Our config in DeepSpeed's words: one pure function, the only place that knows both vocabularies.

Every key that FMEngine owns is written here; every other key of the `deepspeed:` section passes
through. `config.check` refuses a section that sets an owned key, with the name of ours.
"""

import copy
from collections.abc import Iterable
from typing import Any

from fmengine.config.batch import BatchSizes
from fmengine.config.schema import Config
from fmengine.models.tensor_plan import PlanEntry

NEVER = 2**31 - 1
"""`steps_per_print` that is never reached: the monitor prints, not DeepSpeed."""

DEFAULTS: dict[str, Any] = {"zero_optimization": {"memory_efficient_linear": False}}
"""Choices of ours that a `deepspeed:` section may change. memory_efficient_linear would replace torch's `linear` in
the whole process, whatever is trained there."""


def deepspeed_config(config: Config, sizes: BatchSizes) -> dict[str, Any]:
    """The dictionary `deepspeed.initialize` takes.

    Args:
        config: a resolved and checked config.
        sizes: the solved batch triangle.

    Returns:
        DeepSpeed's config; the caller adds the `tensor_parallel` section, which depends on the model.
    """
    owned: dict[str, Any] = {
        "train_batch_size": sizes.global_batch_size,
        "train_micro_batch_size_per_gpu": sizes.micro_batch_size,
        "gradient_accumulation_steps": sizes.gradient_accumulation_steps,
        "gradient_clipping": config.optimizer.gradient_clipping,
        "steps_per_print": NEVER,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": config.train.precision == "bf16"},
        "fp16": {"enabled": config.train.precision == "fp16"},
        "zero_optimization": {"stage": config.parallel.zero_stage},
    }
    if config.train.precision == "bf16":
        owned["data_types"] = {"grad_accum_dtype": "fp32"}
    return merge(merge(copy.deepcopy(DEFAULTS), config.deepspeed), owned)


def tensor_parallel_section(plan: Iterable[PlanEntry], size: int) -> dict[str, Any]:
    """AutoTP's section for a family's tensor plan: nothing by default, every cut named.

    Args:
        plan: the family's entries.
        size: ranks of a tensor-parallel group.
    """
    specs = []
    for entry in plan:
        spec: dict[str, Any] = {"patterns": [f".*{entry.pattern}$"], "partition_type": entry.kind}
        if entry.sizes is not None:
            spec |= {"shape": [list(entry.sizes), -1], "partition_dim": 0}
        specs.append(spec)
    return {"autotp_size": size, "partition_config": {"use_default_specs": False, "layer_specs": specs}}


def merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """`base` with every leaf of `over` written over it, section by section."""
    for key, value in over.items():
        if isinstance(value, dict) and isinstance(base.get(key), dict):
            merge(base[key], value)
        else:
            base[key] = value
    return base
