"""Full float32 state of an engine by parameter name, read and written through DeepSpeed's fragment API.

The recipes that tests/contract pins: what must be done around `safe_get_*` and `safe_set_*` for them to work.
"""

from typing import Any

import torch
from torch import Tensor, nn

MOMENTS = ("exp_avg", "exp_avg_sq")

State = dict[str, dict[str, Tensor]]
"""Parameter name -> {"weight", "exp_avg", "exp_avg_sq"} -> full float32 tensor."""


def base_optimizer(engine: Any) -> torch.optim.Optimizer:
    """The torch optimizer inside DeepSpeed's, or itself at ZeRO-0 in fp32."""
    base: torch.optim.Optimizer = getattr(engine.optimizer, "optimizer", engine.optimizer)
    return base


def link_moments(engine: Any) -> None:
    """Tell ZeRO-1/2's parameters where their moments lie: DeepSpeed links the first parameter group alone."""
    if hasattr(engine.optimizer, "_hp_optimizer_states_linked"):
        engine.optimizer._hp_optimizer_states_linked = False
        engine.optimizer._lazy_init_hp_params_optimizer_state()


def read_state(engine: Any) -> State:
    """Full state of every parameter of this rank's stage. Collective; at least one step must have been taken."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    link_moments(engine)
    state: State = {}
    for name, parameter in engine.module.named_parameters():
        weight = safe_get_full_fp32_param(parameter)
        if weight is None:  # ZeRO-0 in fp32: nothing is wrapped
            values = [parameter, *(base_optimizer(engine).state[parameter][key] for key in MOMENTS)]
        else:
            values = [weight, *(safe_get_full_optimizer_state(parameter, key) for key in MOMENTS)]
        state[name] = {key: value.detach().clone() for key, value in zip(("weight", *MOMENTS), values, strict=True)}
    return state


def write_state(engine: Any, state: State, step: int) -> None:
    """Put full state into an engine that has taken no step. Collective."""
    _make_moments(engine, step)
    link_moments(engine)
    for name, parameter in engine.module.named_parameters():
        if hasattr(parameter, "ds_id"):
            _write_zero3(parameter, state[name])
        elif hasattr(parameter, "_hp_mapping"):
            _write_zero12(parameter, state[name])
        else:
            with torch.no_grad():
                parameter.copy_(state[name]["weight"])
            for key in MOMENTS:
                base_optimizer(engine).state[parameter][key].copy_(state[name][key])


def _make_moments(engine: Any, step: int) -> None:
    base = base_optimizer(engine)
    # ZeRO-3 keeps its partitions (one a sub-group) and lends them to the optimizer inside step().
    partitions = getattr(engine.optimizer, "fp32_partitioned_groups_flat", None)
    for partition in partitions or [one for group in base.param_groups for one in group["params"]]:
        base.state[partition] = {key: torch.zeros_like(partition) for key in MOMENTS}
        base.state[partition]["step"] = torch.tensor(float(step))


def _write_zero12(parameter: nn.Parameter, values: dict[str, Tensor]) -> None:
    from deepspeed.utils import safe_set_full_fp32_param, safe_set_full_optimizer_state

    with torch.no_grad():
        parameter.copy_(values["weight"])  # what the forward uses; the setters below leave it as it was
    safe_set_full_fp32_param(parameter, values["weight"])
    for key in MOMENTS:
        safe_set_full_optimizer_state(parameter, values[key], key)


def _write_zero3(parameter: Any, values: dict[str, Tensor]) -> None:
    import deepspeed
    from deepspeed.utils import safe_set_local_fp32_param, safe_set_local_optimizer_state

    with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0), torch.no_grad():
        parameter.copy_(values["weight"])  # what the forward uses; the setters below leave it as it was

    def slice_of_this_rank(full: Tensor) -> Tensor:
        size, rank = parameter.ds_tensor.numel(), torch.distributed.get_rank()
        padded = torch.zeros(size * torch.distributed.get_world_size())
        padded[: full.numel()] = full.flatten()
        return padded[size * rank : size * (rank + 1)]

    # The full setters fail on the last ranks where the world size does not divide the parameter's size.
    safe_set_local_fp32_param(parameter, slice_of_this_rank(values["weight"]))
    for key in MOMENTS:
        safe_set_local_optimizer_state(parameter, slice_of_this_rank(values[key]), key)
