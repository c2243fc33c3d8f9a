"""How large a model and its checkpoints are, by formula."""

from fmengine.config.model import ModelConfig
from fmengine.config.schema import TrainConfig


def count_parameters(model: ModelConfig) -> int:
    """Parameters of a resolved model, without the padding of its vocabulary.

    A sum over the canonical names: embedding, head, and in each block two norms, attention and MLP.
    LLaMA 7B gives 6,738,415,616 and GPT-NeoX-20B 20,554,567,680, as published.
    """
    hidden, inner = model.hidden_size or 0, model.intermediate_size or 0
    heads = model.num_attention_heads or 1
    head_dim = model.head_dim or hidden // heads
    qkv = (heads + 2 * (model.num_key_value_heads or heads)) * head_dim
    attention = qkv * hidden + heads * head_dim * hidden + (qkv + hidden if model.attention_bias else 0)
    if model.family == "neox":
        norm, mlp = 2 * hidden, 2 * hidden * inner + inner + hidden
    else:
        norm, mlp = hidden, 3 * hidden * inner + (2 * inner + hidden if model.mlp_bias else 0)
    blocks = (model.num_hidden_layers or 0) * (attention + mlp + 2 * norm)
    vocabulary = (model.vocab_size or 0) * hidden * (1 if model.tie_word_embeddings else 2)
    return vocabulary + blocks + norm


def checkpoint_bytes(model: ModelConfig, train: TrainConfig) -> int:
    """Bytes of one checkpoint at most: the weights as computed with, the fp32 master copy and Adam's two moments."""
    weights = 4 if train.precision == "fp32" else 2
    return count_parameters(model) * (weights + 4 + 4 + 4)


def human(size: float) -> str:
    """A count of bytes as one reads it, in powers of 1000 as disks are sold."""
    units = ["B", "kB", "MB", "GB", "TB"]
    while size >= 1000 and len(units) > 1:
        size, units = size / 1000, units[1:]
    return f"{size:.3g} {units[0]}"
