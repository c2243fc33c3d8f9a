"""How tensor parallelism cuts each parameter, as data; and the cut and its inverse.

Sizes follow DeepSpeed's `get_shard_size` for heads that divide evenly: every sub-parameter is cut into
contiguous pieces as even as can be, the larger ones first.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor


@dataclass(frozen=True)
class PlanEntry:
    """What happens to the parameters whose canonical name matches.

    Attributes:
        pattern: regular expression for the whole canonical name. DeepSpeed's `layer_specs` match from the
            start of a name that may have a prefix (a pipeline stage), so give it ".*" + pattern + "$".
        kind: column: cut along dimension 0; row: along dimension 1; replicated: whole on every rank.
        sizes: rows of the sub-parameters that a fused matrix is made of, each cut by itself; None for one.
    """

    pattern: str
    kind: Literal["column", "row", "replicated"]
    sizes: tuple[int, ...] | None = None


def find_entry(plan: Iterable[PlanEntry], name: str) -> PlanEntry:
    """The entry of a canonical name; a name that no entry has is replicated."""
    for entry in plan:
        if re.fullmatch(entry.pattern, name):
            return entry
    return PlanEntry(re.escape(name), "replicated")


def split_shard(entry: PlanEntry, tensor: Tensor, rank: int, world_size: int) -> Tensor:
    """The piece of a full tensor that one rank of the tensor-parallel group holds.

    Args:
        entry: the parameter's entry.
        tensor: the full parameter (or a moment of it).
        rank: place in the tensor-parallel group.
        world_size: its size.
    """
    if entry.kind == "replicated":
        return tensor
    if entry.kind == "row":
        return tensor.tensor_split(world_size, dim=1)[rank]
    parts = tensor.split_with_sizes(list(entry.sizes or (tensor.shape[0],)), dim=0)
    return torch.cat([part.tensor_split(world_size, dim=0)[rank] for part in parts])


def merge_shards(entry: PlanEntry, shards: Sequence[Tensor]) -> Tensor:
    """The full tensor of all ranks' pieces, in rank order: the inverse of `split_shard`."""
    if entry.kind == "replicated":
        return shards[0]
    if entry.kind == "row":
        return torch.cat(list(shards), dim=1)
    sizes = entry.sizes or (sum(shard.shape[0] for shard in shards),)
    pieces = [
        shard.split_with_sizes([_piece(size, rank, len(shards)) for size in sizes], dim=0)
        for rank, shard in enumerate(shards)
    ]
    return torch.cat([piece for sub_parameter in zip(*pieces, strict=True) for piece in sub_parameter])


def _piece(size: int, rank: int, world_size: int) -> int:
    return size // world_size + (rank < size % world_size)
