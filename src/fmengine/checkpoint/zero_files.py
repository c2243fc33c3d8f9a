"""What DeepSpeed 0.19's `save_checkpoint` wrote, read lazily: one model-parallel rank's parameters.

ZeRO-1 and 2 (and the BF16 optimizer): each rank of the ZeRO group has, for each optimizer group, a
slice of the flat fp32 weights and moments, and `param_slice_mappings`: name -> (start, numel) in it.
ZeRO-3: each rank has, for each sub-group, its 1/N of every parameter in turn (rounded up; the last
rank's is padded). ZeRO-0: whole tensors, the moments numbered in the optimizer's order.
Compare deepspeed/utils/zero_to_fp32.py.

The files are memory-mapped, so that a tensor costs memory only while it is read. They are pickles of
DeepSpeed's classes and do not load with `weights_only`: whoever opens them has first checked them
against the manifest's digests, so they are the bytes that we wrote.
"""

import logging
import math
import re
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from fmengine.checkpoint.names import EngineNames

Kind = Literal["weight", "exp_avg", "exp_avg_sq"]
"""fp32 master weight, and Adam's two moments by torch's names."""

_OPTIMIZER = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_LAYER = re.compile(r"layer_\d+(?:-model_(\d+))?-model_states\.pt")


class Shard(Protocol):
    """The state of one model-parallel rank, by DeepSpeed's parameter names."""

    step: int

    @property
    def names(self) -> list[str]:
        """Every parameter of this rank."""
        ...

    def read(self, name: str, kind: Kind) -> Tensor:
        """A parameter (this rank's tensor-parallel piece of it): fp32, in its own shape."""
        ...


@dataclass(frozen=True)
class Fragment:
    """A contiguous piece of a flattened parameter.

    Attributes:
        partition: whose file of the ZeRO group.
        group: which flat tensor in it.
        start: first element.
        numel: number of elements, padding left out.
    """

    partition: int
    group: int
    start: int
    numel: int


class PartitionedShard:
    """ZeRO 1 to 3.

    Args:
        shapes: per flat group, name -> shape, in the order of the flat tensors.
        partitions: each ZeRO rank's file, in rank order, as `torch.load` gave it.
    """

    def __init__(self, shapes: list[dict[str, torch.Size]], partitions: list[dict[str, Any]]) -> None:
        states = [partition["optimizer_state_dict"] for partition in partitions]
        is_zero3 = "fp32_flat_groups" in states[0]
        self._shapes = {name: shape for group in shapes for name, shape in group.items()}
        self._weights = [
            state["fp32_flat_groups" if is_zero3 else "single_partition_of_fp32_groups"] for state in states
        ]
        self._moments = [
            state["optimizer_state_dict" if is_zero3 else "base_optimizer_state"]["state"] for state in states
        ]
        if is_zero3:
            self._fragments = _zero3_fragments(shapes, len(states))
        else:
            self._fragments = _mapped_fragments([state["param_slice_mappings"] for state in states])
        self.step = _step(self._moments[0])

    @property
    def names(self) -> list[str]:
        """Every parameter of this rank."""
        return list(self._shapes)

    def read(self, name: str, kind: Kind) -> Tensor:
        """The pieces of all ZeRO ranks, put together."""
        shape = self._shapes[name]
        fragments = self._fragments[name]
        found = sum(fragment.numel for fragment in fragments)
        if found != math.prod(shape):
            raise ValueError(f"{name}: DeepSpeed's files hold {found} elements of a tensor of shape {tuple(shape)}")
        pieces = [self._flat(fragment, kind).narrow(0, fragment.start, fragment.numel) for fragment in fragments]
        return torch.cat(pieces).view(shape)

    def _flat(self, fragment: Fragment, kind: Kind) -> Tensor:
        weight: Tensor = self._weights[fragment.partition][fragment.group]
        if kind == "weight":
            return weight
        moments = self._moments[fragment.partition].get(fragment.group)
        # no step has been taken yet: AdamW has not made its moments
        moment: Tensor = torch.zeros_like(weight) if moments is None else moments[kind]
        return moment


class WholeShard:
    """ZeRO-0 in fp32.

    Args:
        weights: name -> fp32 tensor.
        optimizer: torch's AdamW state dict.
        order: names in the order of the optimizer's groups.
    """

    def __init__(self, weights: dict[str, Tensor], optimizer: dict[str, Any], order: list[str]) -> None:
        self._weights = weights
        self._state = optimizer["state"]
        self._index = {name: index for index, name in enumerate(order)}
        self.step = _step(self._state)

    @property
    def names(self) -> list[str]:
        """Every parameter of this rank."""
        return list(self._index)

    def read(self, name: str, kind: Kind) -> Tensor:
        """A copy of the tensor in the file."""
        weight = self._weights[name]
        if kind == "weight":
            return weight.clone()
        moments = self._state.get(self._index[name])
        return torch.zeros_like(weight) if moments is None else moments[kind].clone()


def open_shards(folder: Path, table: EngineNames, tensor: int, pipeline: int) -> list[Shard]:
    """Every model-parallel rank's state, in the order of DeepSpeed's `mp_rank` (pipeline x tensor).

    Args:
        folder: what `save_checkpoint` wrote under its tag.
        table: names in it.
        tensor: size of the tensor-parallel group.
        pipeline: number of stages.

    Raises:
        FileNotFoundError: a file is missing.
    """
    _import_deepspeed()
    partitions: dict[int, dict[int, Path]] = defaultdict(dict)
    for path in folder.iterdir():
        if match := _OPTIMIZER.fullmatch(path.name):
            # under sequence parallelism DeepSpeed's mp_rank is the sequence rank, but the state is one
            model_rank = int(match[2]) if tensor * pipeline > 1 else 0
            partitions[model_rank][int(match[1])] = path
    if partitions:
        return [_open_partitioned(folder, rank, partitions[rank]) for rank in range(tensor * pipeline)]
    return [_open_whole(folder, rank, rank % tensor, table) for rank in range(tensor * pipeline)]


def _open_partitioned(folder: Path, model_rank: int, files: dict[int, Path]) -> Shard:
    named = f"mp_rank_{model_rank:02d}_model_states.pt"
    model_file = folder / named
    if not model_file.exists():
        model_file = folder / f"zero_pp_rank_0_{named}"
    shapes = [dict(group) for group in _load(model_file)["param_shapes"]]
    return PartitionedShard(shapes, [_load(files[rank]) for rank in sorted(files)])


def _open_whole(folder: Path, model_rank: int, tensor_rank: int, table: EngineNames) -> Shard:
    state = _load(folder / f"mp_rank_{model_rank:02d}_model_states.pt")
    order, weights = table.optimizer_order[model_rank], state["module"]
    if weights is None:
        layers = _layer_weights(folder, tensor_rank)
        weights = {name: layers[table.parameter_names[name]] for name in order}
    return WholeShard(weights, state["optimizer"], order)


def _layer_weights(folder: Path, tensor_rank: int) -> dict[str, Tensor]:
    """A pipeline has a file for each layer; our stages name their parameters canonically in it (`models.base`)."""
    weights: dict[str, Tensor] = {}
    for path in sorted(folder.iterdir()):
        match = _LAYER.fullmatch(path.name)
        if match and int(match[1] or 0) == tensor_rank:
            weights |= _load(path)
    return weights


def _mapped_fragments(mappings: list[list[dict[str, Any]]]) -> dict[str, list[Fragment]]:
    fragments: dict[str, list[Fragment]] = defaultdict(list)
    for partition, groups in enumerate(mappings):
        for group, mapping in enumerate(groups):
            for name, address in mapping.items():
                fragments[name].append(Fragment(partition, group, address.start, address.numel))
    return fragments


def _zero3_fragments(groups: list[dict[str, torch.Size]], partitions: int) -> dict[str, list[Fragment]]:
    fragments: dict[str, list[Fragment]] = {}
    for group, shapes in enumerate(groups):
        start = 0
        for name, shape in shapes.items():
            numel = math.prod(shape)
            share = -(-numel // partitions)
            fragments[name] = [
                Fragment(rank, group, start, max(0, min(share, numel - rank * share))) for rank in range(partitions)
            ]
            start += share
    return fragments


def _import_deepspeed() -> None:
    """The pickles need its classes; what it says while it is imported (that there is no GPU) is not asked for here."""
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        import deepspeed  # noqa: F401
    finally:
        logging.disable(disabled)


def _step(state: dict[int, dict[str, Any]]) -> int:
    """Updates that the optimizer has made (fp16 leaves out the steps that its loss scaler threw away)."""
    return int(state[0]["step"]) if state else 0


def _load(path: Path) -> Any:
    return torch.load(path, map_location="cpu", mmap=True, weights_only=False)
