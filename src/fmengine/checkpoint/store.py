"""The per-parameter store: the state of a run between two layouts, one safetensors file a parameter.

    STORE/index.json              format, step, samples, and each parameter's file and shape
    STORE/parameters/NAME.safetensors   weight, exp_avg, exp_avg_sq, float32

It is built beside the place where it will be and renamed last, so that a store that is there is whole;
a conversion that was killed goes on with the parameters that are missing.
"""

import json
import logging
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError
from torch import Tensor

from fmengine.checkpoint.files import fsync, remove_tree, write_atomic
from fmengine.checkpoint.find import verify
from fmengine.checkpoint.manifest import COMPLETE, ENGINE, FormatError
from fmengine.checkpoint.reader import ParameterState, open_state
from fmengine.checkpoint.tensors import save_tensors
from fmengine.errors import UserError

log = logging.getLogger(__name__)

FORMAT_VERSION = 1
INDEX = "index.json"
SOURCE = "source"
PARAMETERS = "parameters"
KINDS = ("weight", "exp_avg", "exp_avg_sq")


class Index(BaseModel):
    """What a store says about itself.

    Attributes:
        step: updates that the optimizer has made.
        source: digest of the checkpoint's manifest, so that a store is known to be of this checkpoint.
        parameters: canonical name -> full shape, vocabulary padded.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    format_version: int = FORMAT_VERSION
    step: int
    source: str
    parameters: dict[str, tuple[int, ...]]


def convert(checkpoint: Path, out: Path) -> None:
    """Write a checkpoint's state as a store; the checkpoint is only read. One process does this.

    Args:
        checkpoint: a whole checkpoint of any layout.
        out: the store's folder. One that is there already and of this checkpoint is left as it is, one of
            another checkpoint is replaced.

    Raises:
        UserError: the checkpoint is broken.
        OSError: the store cannot be written; what is written stays for the next attempt.
    """
    manifest = verify(checkpoint, full=False)
    source = (checkpoint / COMPLETE).read_text(encoding="utf-8").strip()
    if (out / INDEX).is_file() and ParameterStore(out).index.source == source:
        return
    write_store(open_state(checkpoint / ENGINE, manifest), source, out)


def write_store(state: ParameterState, source: str, out: Path) -> None:
    """`convert` for a state that is open already; `source` names it, for an attempt to go on with its own part."""
    partial = out.with_name(f".{out.name}.partial")
    parameters = partial / PARAMETERS
    if _text(partial / SOURCE) != source:
        remove_tree(partial)
        parameters.mkdir(parents=True)
        write_atomic(partial / SOURCE, source)
    names = state.names()
    shapes = {name: _write_parameter(state, name, parameters) for name in names}
    for stray in set(parameters.iterdir()) - {_file(parameters, name) for name in names}:
        stray.unlink()  # what a killed attempt had begun
    fsync(parameters)
    index = Index(step=state.step, source=source, parameters=shapes)
    write_atomic(partial / INDEX, index.model_dump_json(indent=1) + "\n")
    remove_tree(out)
    partial.rename(out)
    fsync(out.parent)


class ParameterStore:
    """`ParameterState` over a store; reads one parameter, or a part of one, at a time.

    Raises:
        FormatError: it is of a format that this version does not read.
        UserError: it is no store.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.index = _read_index(path / INDEX)

    @property
    def step(self) -> int:
        """Updates that the optimizer has made."""
        return self.index.step

    def names(self) -> list[str]:
        """Every parameter."""
        return list(self.index.parameters)

    def shape(self, name: str) -> tuple[int, ...]:
        """A parameter's full shape."""
        return self.index.parameters[name]

    def weight(self, name: str) -> Tensor:
        """The fp32 weight."""
        return self.part(name, "weight", ())

    def moments(self, name: str) -> tuple[Tensor, Tensor]:
        """AdamW's exp_avg and exp_avg_sq."""
        return self.part(name, "exp_avg", ()), self.part(name, "exp_avg_sq", ())

    def part(self, name: str, kind: str, slices: tuple[slice, ...]) -> Tensor:
        """A part of a tensor, of which only that part is read.

        Args:
            name: canonical name.
            kind: weight, exp_avg or exp_avg_sq.
            slices: one for each leading dimension, step 1; () is the whole.

        Returns:
            float32 CPU tensor.
        """
        with _safe_open(_file(self._path / PARAMETERS, name)) as file:
            whole = file.get_slice(kind)
            part: Tensor = whole[slices] if slices else whole[:]
        return part


def _write_parameter(state: ParameterState, name: str, folder: Path) -> tuple[int, ...]:
    target = _file(folder, name)
    if target.is_file():
        with _safe_open(target) as file:
            return tuple(file.get_slice("weight").get_shape())
    tensors = dict(zip(KINDS, (state.weight(name), *state.moments(name)), strict=True))
    staged = target.with_suffix(".tmp")
    save_tensors({kind: tensor.contiguous() for kind, tensor in tensors.items()}, staged)
    fsync(staged)
    staged.replace(target)
    return tuple(tensors["weight"].shape)


def _file(folder: Path, name: str) -> Path:
    return folder / f"{name}.safetensors"


def _safe_open(path: Path) -> Any:
    from safetensors import safe_open

    return safe_open(path, framework="pt", device="cpu")


def _text(path: Path) -> str | None:
    return path.read_text(encoding="utf-8") if path.is_file() else None


def _read_index(path: Path) -> Index:
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        if raw["format_version"] != FORMAT_VERSION:
            raise FormatError(f"{path}: format_version {raw['format_version']} is not {FORMAT_VERSION}; convert again")
        return Index.model_validate(raw)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; is {path.parent} a store of parameters?") from None
    except (ValidationError, ValueError, KeyError, TypeError):
        raise UserError(f"{path}: not the index of a store; remove {path.parent} and convert again") from None
