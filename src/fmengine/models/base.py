"""The language model around a family's blocks: flat, or cut into stages for a pipeline."""

import torch
from torch import Tensor, nn

from fmengine.config.model import ModelConfig
from fmengine.kernels.attention import Attention
from fmengine.kernels.loss import LossFunction, cross_entropy_sum
from fmengine.models.family import Family
from fmengine.models.resolved import known


class CausalLM(nn.Module):
    """The whole model; the names of its parameters are the canonical ones.

    With tied embeddings `lm_head.weight` is `embed.weight`: `named_parameters` gives the latter alone.

    Attributes:
        config: the model's config, `num_key_value_heads` filled for every family (AutoTP reads it there).
        loss_function: called with logits and targets; AutoTP puts its own here for a vocabulary-parallel head.
    """

    def __init__(
        self, config: ModelConfig, family: Family, attention: Attention, *, activation_checkpointing: bool = False
    ) -> None:
        super().__init__()
        heads = config.num_key_value_heads or config.num_attention_heads
        self.config = config.model_copy(update={"num_key_value_heads": heads})
        self.embed = embedding(config)
        self.layers = nn.ModuleList(
            family.block(config, attention, activation_checkpointing) for _ in range(known(config.num_hidden_layers))
        )
        self.norm = family.norm(config)
        self.lm_head = head(config)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.embed.weight
        self.loss_function: LossFunction = cross_entropy_sum

    def forward(
        self, input_ids: Tensor, position_ids: Tensor, cu_seqlens: Tensor, targets: Tensor | None = None
    ) -> Tensor:
        """Logits, or the summed loss.

        Args:
            input_ids: int64 [B, S].
            position_ids: int64 [B, S], from 0 in each document.
            cu_seqlens: int32 [N + 1], the documents' bounds in the B x S tokens.
            targets: int64 [B, S], already shifted, IGNORE_INDEX where there is none.

        Returns:
            Logits [B, S, vocab_size] without targets, else the float32 sum of the cross entropy.
        """
        hidden = self.embed(input_ids)
        for block in self.layers:
            hidden = block(hidden, position_ids, cu_seqlens)
        logits = without_padding(self.lm_head(self.norm(hidden)), self.lm_head, known(self.config.vocab_size))
        if targets is None:
            return logits
        return self.loss_function(logits, shift_labels=targets, num_items_in_batch=1)


class Stage(nn.Module):
    """A layer of a pipeline; its parameters' names, relative to it, are the canonical ones.

    Every stage but the last maps (x, *targets, position_ids, cu_seqlens) to the same tuple with another x;
    targets may travel or not.
    """


class EmbedStage(Stage):
    """Token ids to hidden states."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embed = embedding(config)

    def forward(self, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """(input_ids [B, S], ...) -> (hidden [B, S, width], ...)."""
        input_ids, *rest = inputs
        return (self.embed(input_ids), *rest)


class BlockStage(Stage):
    """One block, under its index in the flat model."""

    def __init__(
        self,
        config: ModelConfig,
        family: Family,
        attention: Attention,
        *,
        layer: int,
        activation_checkpointing: bool = False,
    ) -> None:
        super().__init__()
        block = family.block(config, attention, activation_checkpointing)
        self.layers = nn.ModuleDict({str(layer): block})

    def forward(self, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """(hidden [B, S, width], ...) -> the same, one block on."""
        hidden, *targets, position_ids, cu_seqlens = inputs
        (block,) = self.layers.values()
        return (block(hidden, position_ids, cu_seqlens), *targets, position_ids, cu_seqlens)


class HeadStage(Stage):
    """Last norm and head. A tied head holds its own `embed`, which the pipeline ties to the first stage's."""

    def __init__(self, config: ModelConfig, family: Family) -> None:
        super().__init__()
        self.vocab_size = known(config.vocab_size)
        self.norm = family.norm(config)
        self.tied = bool(config.tie_word_embeddings)
        if self.tied:
            self.embed = embedding(config)
        else:
            self.lm_head = head(config)

    def forward(self, inputs: tuple[Tensor, ...]) -> Tensor:
        """(hidden, targets, position_ids, cu_seqlens) -> float32 summed loss; without targets the logits."""
        hidden, *targets, _, _ = inputs
        hidden = self.norm(hidden)
        logits = nn.functional.linear(hidden, self.embed.weight) if self.tied else self.lm_head(hidden)
        logits = logits[..., : self.vocab_size]
        return cross_entropy_sum(logits, shift_labels=targets[0]) if targets else logits


def embedding(config: ModelConfig) -> nn.Embedding:
    """Embedding of the padded vocabulary."""
    return nn.Embedding(config.padded_vocab_size, known(config.hidden_size))


def head(config: ModelConfig) -> nn.Linear:
    """Projection to the padded vocabulary."""
    return nn.Linear(known(config.hidden_size), config.padded_vocab_size, bias=False)


def without_padding(logits: Tensor, head: nn.Module, vocab_size: int) -> Tensor:
    """Logits in which the padded rows of the vocabulary take no part in a softmax.

    Args:
        logits: [B, S, rows of the head]; of a vocabulary-parallel head this rank's columns.
        head: what made them. DeepSpeed's vocabulary-parallel layer says where its columns start.
        vocab_size: tokens in the vocabulary.

    Returns:
        The first vocab_size columns; of a vocabulary-parallel head all of them (its loss wants every shard
        whole), minus infinity where padded.
    """
    first = getattr(head, "vocab_start_index", None)
    if first is None:
        return logits[..., :vocab_size]
    if first + logits.shape[-1] <= vocab_size:
        return logits
    columns = torch.arange(first, first + logits.shape[-1], device=logits.device)
    return logits.masked_fill(columns >= vocab_size, float("-inf"))
