"""Tensors of a Hugging Face folder, one safetensors file or several with an index, read one at a time.

The format is safetensors' own README: 8 bytes of header length, a JSON header with each tensor's
dtype, shape and byte range, then the bytes.
"""

import json
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from fmengine.errors import UserError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
DTYPES = ("F64", "F32", "F16", "BF16")
OTHER_NAMES = {"embed_out.weight": "lm_head.weight"}
"""GPT-NeoX's head: Transformers writes the first, and reads the second too."""


@dataclass(frozen=True)
class _Entry:
    file: Path
    shape: tuple[int, ...]


class SafetensorsFolder:
    """Every tensor's place and shape, from the headers alone.

    Args:
        folder: holds model.safetensors, or model.safetensors.index.json and the files it names.

    Raises:
        UserError: a file is missing, cut short or no safetensors, or lacks a tensor that the index promises.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        index = _read_index(folder)
        files = sorted(set(index.values())) if index else [folder / SINGLE]
        self._entries: dict[str, _Entry] = {}
        for file in files:
            promised = next((name for name, place in index.items() if place == file), None)
            self._entries |= _read_header(file, promised)
        for name, file in index.items():
            if name not in self._entries or self._entries[name].file != file:
                raise UserError(f"{file}: tensor {name} is not in it, though {INDEX} says so; download the model again")

    @property
    def names(self) -> list[str]:
        """Names of all tensors."""
        return list(self._entries)

    def resolve(self, name: str) -> str:
        """The name under which the folder has a tensor."""
        other = OTHER_NAMES.get(name, name)
        return other if name not in self._entries and other in self._entries else name

    def file_of(self, name: str) -> Path:
        """The file that holds a tensor."""
        return self._entry(name).file

    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's shape."""
        return self._entry(name).shape

    def read(self, name: str) -> Tensor:
        """A tensor, in its own type, on the CPU."""
        from safetensors import SafetensorError, safe_open

        file = self.file_of(name)
        try:
            with safe_open(file, framework="pt", device="cpu") as source:
                tensor: Tensor = source.get_tensor(self.resolve(name))
        except (SafetensorError, OSError) as error:
            raise UserError(f"{file}: tensor {name} cannot be read ({error}); download the model again") from error
        return tensor

    def _entry(self, name: str) -> _Entry:
        entry = self._entries.get(self.resolve(name))
        if entry is None:
            raise UserError(
                f"{self._folder}: tensor {name} is in none of the safetensors files; download the model again"
            )
        return entry


def _read_index(folder: Path) -> dict[str, Path]:
    path = folder / INDEX
    if (folder / SINGLE).is_file() or not path.is_file():
        return {}
    try:
        names = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        return {str(name): folder / str(file) for name, file in names.items()}
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        raise UserError(f"{path}: no index of safetensors files ({error}); download the model again") from error


def _read_header(file: Path, promised: str | None) -> dict[str, _Entry]:
    wanted = f" (tensor {promised} should be in it)" if promised else ""
    try:
        size = file.stat().st_size
        with file.open("rb") as source:
            (length,) = struct.unpack("<Q", source.read(8))
            if 8 + length > size:
                raise UserError(f"{file}: cut short inside its header{wanted}; download the model again")
            header: dict[str, Any] = json.loads(source.read(length))
    except FileNotFoundError as error:
        raise UserError(f"{file}: no such file{wanted}; the weights must be safetensors") from error
    except (OSError, struct.error, ValueError) as error:
        raise UserError(f"{file}: no safetensors file{wanted} ({error}); download the model again") from error
    try:
        header.pop("__metadata__", None)
        return {name: _entry(file, size - 8 - length, name, value) for name, value in header.items()}
    except (TypeError, KeyError, IndexError, AttributeError) as error:
        raise UserError(f"{file}: no safetensors file{wanted}: its header is of another form") from error


def _entry(file: Path, size: int, name: str, header: dict[str, Any]) -> _Entry:
    if header["data_offsets"][1] > size:
        raise UserError(
            f"{file}: cut short: tensor {name} ends {header['data_offsets'][1] - size} bytes after it; "
            "download the model again"
        )
    if header["dtype"] not in DTYPES:
        raise UserError(f"{file}: tensor {name} is {header['dtype']}; quantised weights are not supported")
    return _Entry(file, tuple(header["shape"]))
