"""Full float32 state of an engine by parameter name, read and written through DeepSpeed's fragment API.

The recipes that tests/contract pins: what must be done around `safe_get_*` and `safe_set_*` for them to work.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fmengine.engine.restore import MOMENTS, restore_parameters

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
    """Put full state into an engine that has taken no step, as the product does it. Collective."""
    parameters = dict(engine.module.named_parameters())
    restore_parameters(engine, parameters, InMemory(state, step), lambda _name, tensor: tensor, step)


@dataclass(frozen=True)
class InMemory:
    """A `ParameterState` over tensors at hand."""

    state: State
    step: int

    def names(self) -> list[str]:
        """Every parameter."""
        return list(self.state)

    def weight(self, name: str) -> Tensor:
        """The fp32 weight."""
        return self.state[name]["weight"]

    def moments(self, name: str) -> tuple[Tensor, Tensor]:
        """AdamW's exp_avg and exp_avg_sq."""
        return self.state[name]["exp_avg"], self.state[name]["exp_avg_sq"]
