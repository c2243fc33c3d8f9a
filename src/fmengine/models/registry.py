"""The families, and a model or its pipeline stages from a config. A new family is one file and one row here."""

from functools import partial
from typing import Any

from fmengine.config.model import ModelConfig
from fmengine.kernels.attention import Attention
from fmengine.models.base import BlockStage, CausalLM, EmbedStage, HeadStage
from fmengine.models.family import Family
from fmengine.models.llama import LLAMA
from fmengine.models.neox import NEOX
from fmengine.models.resolved import known

FAMILIES: dict[str, Family] = {"llama": LLAMA, "neox": NEOX}
"""`model.family` -> what it is."""


def family_of(config: ModelConfig) -> Family:
    """The row of a resolved config's family."""
    return FAMILIES[known(config.family)]


def build(config: ModelConfig, *, attention: Attention, activation_checkpointing: bool = False) -> CausalLM:
    """The flat model, with torch's default values in it: weights come from a `WeightSource`.

    Args:
        config: a resolved model config.
        attention: what `kernels.attention.select_attention` chose.
        activation_checkpointing: recompute each block in the backward pass.
    """
    return CausalLM(config, family_of(config), attention, activation_checkpointing=activation_checkpointing)


def stages(config: ModelConfig, *, attention: Attention, activation_checkpointing: bool = False) -> list[partial[Any]]:
    """The same model as layers of a pipeline: embedding, each block, head; calling one builds it.

    `stage.func`, `.args` and `.keywords` are what DeepSpeed's LayerSpec takes. Where embeddings are tied, first and
    last share `embed.weight` (TiedLayerSpec's tied_weight_attr).
    """
    family = family_of(config)
    blocks: list[partial[Any]] = [
        partial(BlockStage, config, family, attention, layer=layer, activation_checkpointing=activation_checkpointing)
        for layer in range(known(config.num_hidden_layers))
    ]
    first: partial[Any] = partial(EmbedStage, config)
    last: partial[Any] = partial(HeadStage, config, family)
    return [first, *blocks, last]
