"""Initial weights: each depends on (seed, its canonical name) alone, so that every layout starts equal."""

import hashlib

import torch
from torch import Tensor

from fmengine.config.model import ModelConfig
from fmengine.models.family import Family
from fmengine.models.names import ParameterName


def initial_weight(config: ModelConfig, family: Family, seed: int, name: str, shape: tuple[int, ...]) -> Tensor:
    """The full initial value of a parameter: norms one, biases zero, matrices normal with the family's deviation.

    Args:
        config: a resolved model config.
        family: its family.
        seed: run.seed.
        name: canonical name.
        shape: full shape, vocabulary padded; padded rows are zero and change no other row.

    Returns:
        float32, on the CPU.
    """
    parameter = ParameterName.parse(name)
    if parameter.leaf == "bias":
        return torch.zeros(shape)
    if parameter.is_norm:
        return torch.ones(shape)
    weight = torch.zeros(shape)
    rows = weight[: config.vocab_size] if parameter.is_vocabulary else weight
    rows.normal_(0.0, family.initial_std(config, name), generator=generator(seed, name))
    return weight


def generator(seed: int, name: str) -> torch.Generator:
    """A CPU generator whose state depends on (seed, name) alone, through BLAKE2b."""
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    return torch.Generator("cpu").manual_seed(int.from_bytes(digest, "little") >> 1)
