"""Rotary position embedding (Su et al., arXiv 2104.09864), with Hugging Face's pairing of a head's two halves.

Nothing here is a buffer: the tables are computed in float32 where they are used, so that no engine can
cast, shard or forget them, and `torch.compile` fuses them into the rotation.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fmengine.config.model import RopeScaling


@dataclass(frozen=True)
class Rotary:
    """Rotation of the first `dim` entries of a head.

    Attributes:
        dim: how many entries are rotated; even.
        theta: base of the frequencies.
        scaling: how they are stretched, or None.
    """

    dim: int
    theta: float
    scaling: RopeScaling | None = None

    def __call__(self, q: Tensor, k: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Rotate q [B, S, H, D] and k [B, S, KV, D] by their positions [B, S], in float32, and cast back."""
        frequencies = inverse_frequencies(self, position_ids.device)
        angles = (position_ids[..., None].float() * frequencies).unsqueeze(2)
        cos, sin = angles.cos(), angles.sin()
        return rotate(q, cos, sin), rotate(k, cos, sin)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs (i, i + R/2) of x [B, S, H, D] by angles given as cos and sin [B, S, 1, R/2] in float32."""
    half = cos.shape[-1]
    first, second, rest = x.float().split_with_sizes([half, half, x.shape[-1] - 2 * half], dim=-1)
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)
    return rotated.to(x.dtype)


def inverse_frequencies(rotary: Rotary, device: torch.device) -> Tensor:
    """Radians per position of each pair: float32 [dim / 2].

    `linear` divides them all (kaiokendev's position interpolation, arXiv 2306.15595). `llama3` divides the long
    waves only, with a ramp between (meta-llama/llama-models, models/llama3/reference_impl/model.py,
    `apply_scaling`). The order of operations is that of Transformers' modeling_rope_utils.py.
    """
    exponents = torch.arange(0, rotary.dim, 2, device=device, dtype=torch.float32) / rotary.dim
    frequencies = 1.0 / (rotary.theta**exponents)
    scaling = rotary.scaling
    if scaling is None:
        return frequencies
    if scaling.rope_type == "linear":
        return frequencies / scaling.factor
    waves = 2 * math.pi / frequencies
    length, low, high = (
        scaling.original_max_position_embeddings,
        scaling.low_freq_factor,
        scaling.high_freq_factor,
    )
    ramp = (length / waves - low) / (high - low)
    between = (1 - ramp) * frequencies / scaling.factor + ramp * frequencies
    stretched = torch.where(waves > length / low, frequencies / scaling.factor, frequencies)
    is_between = (waves >= length / high) & (waves <= length / low)
    return torch.where(is_between, between, stretched)
