"""The one shape in which training data travels, from the loader through every pipeline stage."""

from dataclasses import dataclass

import torch
from torch import Tensor

IGNORE_INDEX = -100
"""Target value of a position that is not trained on (the default of torch's cross entropy)."""


@dataclass(frozen=True)
class Batch:
    """One micro-batch of one rank; integer tensors of fixed shape.

    B is the micro-batch size, S the sequence length. Under sequence parallelism the first three
    hold this rank's slice of S; cu_seqlens always speaks of the whole B x S tokens.

    Attributes:
        input_ids: int64 [B, S].
        targets: int64 [B, S], already shifted: the token that follows, or IGNORE_INDEX.
        position_ids: int64 [B, S], counted from 0 in each document.
        cu_seqlens: int32 [D + 1], the documents' bounds in the flattened B x S tokens, first 0,
            padded at the end with B * S (so padding is empty documents). A document never spans
            two rows; with document masking off each row is one document.
    """

    input_ids: Tensor
    targets: Tensor
    position_ids: Tensor
    cu_seqlens: Tensor

    def to(self, device: torch.device) -> "Batch":
        """The same batch on a device; the copy does not block where the memory is pinned."""

        def move(tensor: Tensor) -> Tensor:
            return tensor.to(device=device, non_blocking=True)

        return Batch(move(self.input_ids), move(self.targets), move(self.position_ids), move(self.cu_seqlens))
