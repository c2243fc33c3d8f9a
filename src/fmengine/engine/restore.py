"""Per-parameter optimizer state into a live DeepSpeed engine, whatever layout wrote it.

DeepSpeed keeps flat fp32 partitions; its tensor-fragment API maps a parameter to its piece of them. The
moments do not exist before the first step, so they are made first. Facts pinned in tests/contract.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fmengine.checkpoint.reader import ParameterState

MOMENTS = ("exp_avg", "exp_avg_sq")
"""Adam's two moments, by torch's names."""


@torch.no_grad()
def restore_parameters(
    engine: Any,
    parameters: dict[str, nn.Parameter],
    state: ParameterState,
    split: Callable[[str, Tensor], Tensor],
    step: int,
) -> None:
    """Write weights, moments and step counts into a fresh engine. Collective.

    Args:
        engine: a DeepSpeed engine that has taken no step.
        parameters: this rank's parameters by canonical name.
        state: where the full tensors come from.
        split: full tensor -> this tensor-parallel rank's shard.
        step: optimizer steps of the run; more than `state.step` updates where fp16's loss scaler threw some away.
    """
    optimizer = engine.optimizer
    sharded = hasattr(next(iter(parameters.values())), "ds_id") or hasattr(optimizer, "_link_all_hp_params")
    base = optimizer.optimizer if sharded else optimizer
    _make_moments(base, _master_partitions(optimizer, base), state.step)
    if hasattr(optimizer, "_lazy_init_hp_params_optimizer_state"):
        optimizer._lazy_init_hp_params_optimizer_state()
    for name, parameter in parameters.items():
        values = dict(zip(MOMENTS, state.moments(name), strict=True))
        tensors = {key: split(name, value) for key, value in values.items()}
        _write(parameter, base, split(name, state.weight(name)), tensors, sharded)
    engine.global_steps = step
    engine.micro_steps = step * engine.gradient_accumulation_steps()
    engine.global_samples = step * engine.train_batch_size()


def _master_partitions(optimizer: Any, base: torch.optim.Optimizer) -> list[Tensor]:
    # ZeRO-3 keeps its flat partitions itself and lends them to the optimizer one at a time in step()
    flat = getattr(optimizer, "fp32_partitioned_groups_flat", None)
    if flat is not None:
        return list(flat)
    return [parameter for group in base.param_groups for parameter in group["params"]]


def _make_moments(base: torch.optim.Optimizer, partitions: list[Tensor], step: int) -> None:
    for partition in partitions:
        # torch keeps the step of a fused optimizer on the device, of the others on the CPU
        fused = bool(base.defaults.get("fused"))
        base.state[partition] = {
            "step": torch.tensor(float(step), device=partition.device if fused else "cpu"),
            **{key: torch.zeros_like(partition) for key in MOMENTS},
        }


def _write(
    parameter: nn.Parameter,
    base: torch.optim.Optimizer,
    weight: Tensor,
    moments: dict[str, Tensor],
    sharded: bool,
) -> None:
    """One parameter's state; the setters leave the weights that the forward pass uses as they were."""
    if hasattr(parameter, "ds_id"):
        _write_zero3(parameter, weight, moments)
        return
    parameter.copy_(weight)
    if not sharded:
        for key, value in moments.items():
            base.state[parameter][key].copy_(value)
        return
    from deepspeed.utils import safe_set_full_fp32_param, safe_set_full_optimizer_state

    safe_set_full_fp32_param(parameter, weight.to(parameter.device))
    for key, value in moments.items():
        safe_set_full_optimizer_state(parameter, value.to(parameter.device), key)


def _write_zero3(parameter: Any, weight: Tensor, moments: dict[str, Tensor]) -> None:
    import deepspeed
    from deepspeed.utils import safe_set_local_fp32_param, safe_set_local_optimizer_state

    with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
        parameter.copy_(weight)
    group = parameter.ds_process_group
    size, rank, ranks = parameter.ds_tensor.numel(), dist.get_rank(group), dist.get_world_size(group)

    def piece(full: Tensor) -> Tensor:
        # the full setters fail on the last ranks where the ranks do not divide the parameter evenly
        padded = torch.zeros(size * ranks, device=parameter.ds_tensor.device)
        padded[: full.numel()] = full.flatten()
        return padded[size * rank : size * (rank + 1)]

    safe_set_local_fp32_param(parameter, piece(weight))
    for key, value in moments.items():
        safe_set_local_optimizer_state(parameter, piece(value), key)
