"""A checkpoint's parameters under canonical names, whole and in fp32, at whatever layout it was written."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from torch import Tensor

from fmengine.checkpoint import names as engine_names
from fmengine.checkpoint.durable import TAG
from fmengine.checkpoint.files import list_files
from fmengine.checkpoint.find import check_digests
from fmengine.checkpoint.manifest import COMPLETE, MANIFEST, Manifest
from fmengine.checkpoint.zero_files import Kind, Shard, open_shards
from fmengine.errors import UserError

Merge = Callable[[str, Sequence[Tensor]], Tensor]
"""Canonical name and the tensor-parallel ranks' pieces, in rank order -> the full tensor."""


class ParameterState(Protocol):
    """Full fp32 CPU state of every parameter, by canonical name."""

    @property
    def step(self) -> int:
        """Updates that the optimizer has made."""
        ...

    def names(self) -> list[str]:
        """Every parameter."""
        ...

    def weight(self, name: str) -> Tensor:
        """The fp32 weight in its full shape (vocabulary padded as in training)."""
        ...

    def moments(self, name: str) -> tuple[Tensor, Tensor]:
        """AdamW's exp_avg and exp_avg_sq, shaped like the weight."""
        ...


class StateReader:
    """`ParameterState` over DeepSpeed's files; holds no tensor, reads one parameter at a time.

    Args:
        shards: the model-parallel ranks' states; rank = pipeline rank x tensor size + tensor rank.
        canonical: DeepSpeed's parameter name -> canonical name.
        tensor_size: ranks of a tensor-parallel group.
        merge: puts tensor-parallel pieces together.
    """

    def __init__(self, shards: Sequence[Shard], canonical: dict[str, str], tensor_size: int, merge: Merge) -> None:
        self._shards, self._merge = shards, merge
        self.step = shards[0].step
        self._places: dict[str, list[tuple[int, str]]] = defaultdict(list)
        for first in range(0, len(shards), tensor_size):
            for name in shards[first].names:
                places = self._places[canonical[name]]
                if not places:  # a tied weight is on two pipeline stages, and equal there
                    places += [(rank, name) for rank in range(first, first + tensor_size)]

    def names(self) -> list[str]:
        """Every parameter, in the order of DeepSpeed's files."""
        return list(self._places)

    def weight(self, name: str) -> Tensor:
        """The fp32 weight in its full shape."""
        return self._read(name, "weight")

    def moments(self, name: str) -> tuple[Tensor, Tensor]:
        """AdamW's exp_avg and exp_avg_sq, shaped like the weight."""
        return self._read(name, "exp_avg"), self._read(name, "exp_avg_sq")

    def _read(self, name: str, kind: Kind) -> Tensor:
        pieces = [self._shards[rank].read(shard_name, kind) for rank, shard_name in self._places[name]]
        return pieces[0] if len(pieces) == 1 else self._merge(name, pieces)


def open_state(engine_folder: Path, manifest: Manifest) -> StateReader:
    """Open an engine's folder of a checkpoint.

    Every file is first compared with the manifest's digest: DeepSpeed's files are pickles, and only the
    bytes that we wrote ourselves are loaded.

    Args:
        engine_folder: CHECKPOINT/engine.
        manifest: CHECKPOINT's.

    Raises:
        UserError: a file has changed or is missing, or the names in the files are not the model's.
    """
    checkpoint = engine_folder.parent
    check_digests(checkpoint, manifest)
    if strangers := set(list_files(checkpoint)) - set(manifest.files) - {MANIFEST, COMPLETE}:
        raise UserError(f"{checkpoint / min(strangers)}: not in the manifest, so not of this checkpoint; move it away")
    reader = open_unchecked(engine_folder, manifest.layout.tensor, manifest.layout.pipeline, merge_by_plan(manifest))
    expected = set(_shapes(manifest))
    if expected != set(reader.names()):
        odd = ", ".join(sorted(expected ^ set(reader.names()))[:5])
        raise UserError(f"{engine_folder}: does not hold the parameters of its model ({odd}); use another checkpoint")
    return reader


def open_unchecked(engine_folder: Path, tensor: int, pipeline: int, merge: Merge) -> StateReader:
    """`open_state` without the digests and the model: for files that this very process wrote."""
    table = engine_names.read(engine_folder)
    shards = open_shards(engine_folder / TAG, table, tensor, pipeline)
    return StateReader(shards, table.parameter_names, tensor, merge)


def merge_by_plan(manifest: Manifest) -> Merge:
    """Pieces put together by the family's tensor plan; pieces that are whole already are replicas."""
    from fmengine.models.registry import family_of
    from fmengine.models.tensor_plan import find_entry, merge_shards

    model = manifest.model
    plan = family_of(model).tensor_plan(model, vocabulary_parallel=True)
    shapes = _shapes(manifest)

    def merge(name: str, pieces: Sequence[Tensor]) -> Tensor:
        if tuple(pieces[0].shape) == shapes[name]:
            return pieces[0]
        return merge_shards(find_entry(plan, name), pieces)

    return merge


def _shapes(manifest: Manifest) -> dict[str, tuple[int, ...]]:
    from fmengine.models.registry import family_of

    return family_of(manifest.model).parameter_shapes(manifest.model)
