"""The optimizer that DeepSpeed wraps: AdamW in two groups, decayed and not."""

from collections.abc import Callable, Iterable

import torch
from torch import nn

from fmengine.config.schema import OptimizerConfig


def build_optimizer(
    named_parameters: Iterable[tuple[str, nn.Parameter]],
    config: OptimizerConfig,
    decays: Callable[[str], bool],
) -> torch.optim.AdamW:
    """AdamW (Loshchilov and Hutter, arXiv 1711.05101) over canonical names.

    Args:
        named_parameters: canonical name and parameter, in the model's order.
        config: hyper-parameters; the learning rate is set anew before each step.
        decays: whether a name's weight decays (the family's rule).

    Returns:
        torch's AdamW, fused where the parameters are on a GPU; an empty group is left out.
    """
    groups: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    on_gpu = False
    for name, parameter in named_parameters:
        groups[decays(name)].append(parameter)
        on_gpu = on_gpu or parameter.is_cuda
    parameter_groups = [
        {"params": parameters, "weight_decay": config.weight_decay if decayed else 0.0}
        for decayed, parameters in groups.items()
        if parameters
    ]
    return torch.optim.AdamW(
        parameter_groups, lr=config.learning_rate, betas=config.betas, eps=config.eps, fused=on_gpu or None
    )
