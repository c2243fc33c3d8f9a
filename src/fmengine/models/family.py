"""What a model family is to everyone else: one row of functions and tables."""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from fmengine.config.model import ModelConfig
from fmengine.kernels.attention import Attention, dense_attention
from fmengine.models.layers import Block
from fmengine.models.names import ParameterName
from fmengine.models.resolved import known
from fmengine.models.tensor_plan import PlanEntry

LAYER = r"layers\.\d+\."


def decays(name: str) -> bool:
    """Whether a parameter's weight decays: the matrices do; norms, biases and the embedding do not.

    Norms and biases as in EleutherAI/gpt-neox (megatron/model/utils.py,
    `get_params_for_weight_decay_optimization`) and Megatron-LM, which LLaMA's papers do not contradict (they give
    the 0.1 alone). gpt-neox does decay the embedding; here it is left out, as `optimizer.weight_decay` says.
    """
    parameter = ParameterName.parse(name)
    return parameter.leaf == "weight" and not parameter.is_norm and parameter.module != "embed"


@dataclass(frozen=True)
class Family:
    """A model family.

    Attributes:
        block: builds one layer (config, attention, activation_checkpointing).
        norm: builds the last norm.
        initial_std: standard deviation of a matrix's initial values, by canonical name.
        fused_rows: modules whose matrix is several of Hugging Face's on top of one another -> rows of each.
        hf_modules: canonical module -> Hugging Face's modules, "{}" standing for the layer.
        column: modules that tensor parallelism cuts along their outputs.
        row: modules it cuts along their inputs.
        decays: the rule of weight decay, by canonical name.
    """

    block: Callable[[ModelConfig, Attention, bool], Block]
    norm: Callable[[ModelConfig], nn.Module]
    initial_std: Callable[[ModelConfig, str], float]
    fused_rows: Callable[[ModelConfig], Mapping[str, tuple[int, ...]]]
    hf_modules: Mapping[str, tuple[str, ...]]
    column: tuple[str, ...]
    row: tuple[str, ...]
    decays: Callable[[str], bool] = decays

    def tensor_plan(self, config: ModelConfig, *, vocabulary_parallel: bool) -> tuple[PlanEntry, ...]:
        """How tensor parallelism cuts the parameters; what is not named is replicated.

        Args:
            config: a resolved model config.
            vocabulary_parallel: whether the head (and an embedding tied to it) is cut along the vocabulary.
        """
        fused = self.fused_rows(config)
        plan = [
            PlanEntry(LAYER + re.escape(module) + r"\.(weight|bias)", "column", fused.get(module))
            for module in self.column
        ]
        plan += [PlanEntry(LAYER + re.escape(module) + r"\.weight", "row") for module in self.row]
        if vocabulary_parallel:
            plan.append(PlanEntry("embed.weight" if config.tie_word_embeddings else "lm_head.weight", "column"))
        return tuple(plan)

    def parameter_shapes(self, config: ModelConfig) -> dict[str, tuple[int, ...]]:
        """Canonical name -> shape, vocabulary padded, in the flat model's order. Allocates nothing."""
        with torch.device("meta"):
            block = self.block(config, dense_attention(mask_documents=True), False)
            norm = self.norm(config)
        rows = (config.padded_vocab_size, known(config.hidden_size))
        shapes: dict[str, tuple[int, ...]] = {"embed.weight": rows}
        for layer in range(known(config.num_hidden_layers)):
            shapes |= {f"layers.{layer}.{name}": tuple(p.shape) for name, p in block.named_parameters()}
        shapes |= {f"norm.{name}": tuple(p.shape) for name, p in norm.named_parameters()}
        if not config.tie_word_embeddings:
            shapes["lm_head.weight"] = rows
        return shapes

    def flops_per_token(self, config: ModelConfig, sequence_length: int) -> float:
        """Floating-point operations of a forward and backward pass, per token of a full sequence.

        6 x (parameters - embedding) + 12 x layers x heads x head width x sequence: the PaLM paper's count
        (Chowdhery et al., arXiv 2204.02311, appendix B), as torchtitan counts it. Attention is counted whole, not
        halved for the causal mask; a head's matrix counts even where it is the embedding's; padding does not.
        """
        width, vocabulary = known(config.hidden_size), known(config.vocab_size)
        shapes = self.parameter_shapes(config)
        inner = sum(math.prod(shape) for name, shape in shapes.items() if not ParameterName.parse(name).is_vocabulary)
        per_layer = 12 * known(config.num_attention_heads) * head_dim(config) * sequence_length
        return float(6 * (inner + vocabulary * width) + per_layer * known(config.num_hidden_layers))


def head_dim(config: ModelConfig) -> int:
    """Width of a head; hidden_size / heads where the family has no option for it."""
    return config.head_dim or known(config.hidden_size) // known(config.num_attention_heads)
