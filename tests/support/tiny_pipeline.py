"""A pipeline of three small layers on two stages, and the same layers in one module."""

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from support.tiny import FEATURES, HIDDEN, adamw, config

SIZES = (FEATURES, HIDDEN, HIDDEN, FEATURES)


class Layer(nn.Module):
    """Linear and tanh."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)

    def forward(self, hidden: Tensor) -> Tensor:
        """[B, inputs] to [B, outputs]."""
        return torch.tanh(self.linear(hidden.to(self.linear.weight.dtype)))


def summed_error(outputs: Tensor, targets: Tensor) -> Tensor:
    """Float32 scalar, summed over the micro-batch."""
    return (outputs.float() - targets).square().sum()


def plain_layers() -> nn.Sequential:
    """All layers, with the weights that `pipeline` has."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(*(Layer(*sizes) for sizes in pairwise(SIZES)))


def pipeline(
    stage: int, precision: str = "fp32", *, method: str = "uniform", seed: int = 0, stages: int = 2, **keys: Any
) -> Any:
    """A pipeline engine over `plain_layers`, every weight raised by `seed`; `keys` as for `tiny.config`."""
    import deepspeed
    from deepspeed.pipe import LayerSpec, PipelineModule

    layers = [LayerSpec(Layer, *sizes) for sizes in pairwise(SIZES)]
    module = PipelineModule(layers=layers, num_stages=stages, loss_fn=summed_error, partition_method=method)
    whole = dict(plain_layers().named_parameters())
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(whole[name] + seed)
    engine, *_ = deepspeed.initialize(model=module, optimizer=adamw(module), config=config(stage, precision, **keys))
    return engine
