"""Where a model's weights come from: full float32 tensors by canonical name, made one at a time."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from fmengine.config.model import ModelConfig
from fmengine.errors import UserError
from fmengine.models.hf import from_hf, hf_names, is_ignored
from fmengine.models.init import initial_weight
from fmengine.models.registry import family_of
from fmengine.models.resolved import known
from fmengine.models.safetensors_folder import SafetensorsFolder

WeightSource = Callable[[str], Tensor]
"""Canonical name -> the full parameter: float32, on the CPU, vocabulary padded."""


def from_seed(config: ModelConfig, seed: int) -> WeightSource:
    """The family's published initialisation; a value depends on (seed, name) alone."""
    family = family_of(config)
    shapes = family.parameter_shapes(config)
    return lambda name: initial_weight(config, family, seed, name, shapes[name])


def from_pretrained(config: ModelConfig) -> WeightSource:
    """The weights in the safetensors of `config.pretrained`.

    Every header is read and compared with the config before this returns; tensors are read when asked for.

    Raises:
        UserError: a file is missing or damaged, or a tensor is missing, has the wrong shape or no place.
    """
    folder = SafetensorsFolder(known(config.pretrained))
    _check(config, folder)

    def read(name: str) -> Tensor:
        return from_hf(config, name, folder.read).float()

    return read


@torch.no_grad()
def load_weights(module: nn.Module, source: WeightSource) -> None:
    """Fill a whole model, or a pipeline stage, from a source; values take the parameters' type and device."""
    for name, parameter in module.named_parameters():
        parameter.copy_(source(name))


def _check(config: ModelConfig, folder: SafetensorsFolder) -> None:
    expected: set[str] = set()
    for name, shape in family_of(config).parameter_shapes(config).items():
        for hf_name, hf_shape in hf_names(config, name, shape).items():
            found = folder.shape(hf_name)
            if found != hf_shape:
                raise UserError(
                    f"{folder.file_of(hf_name)}: tensor {hf_name} has shape {list(found)}, but config.json asks for "
                    f"{list(hf_shape)}; the two do not belong together"
                )
            expected.add(folder.resolve(hf_name))
    for hf_name in folder.names:
        if hf_name not in expected and not is_ignored(config, hf_name):
            raise UserError(
                f"{folder.file_of(hf_name)}: tensor {hf_name} has no place in the model that config.json describes; "
                "this architecture is not supported"
            )
