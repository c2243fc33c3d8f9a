"""safetensors files, with the system's refusals as the OSErrors that they are."""

import os
import re
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor


def save_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Write contiguous CPU tensors into a safetensors file; not flushed.

    Raises:
        OSError: the disk is full or refuses (safetensors itself raises an error of its own for that).
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    path.touch()  # for the mode that the user's umask gives a new file
    mode = path.stat().st_mode
    try:
        # Transformers asks for this metadata
        save_file(dict(tensors), path, metadata={"format": "pt"})
    except SafetensorError as error:
        code = re.search(r"\(os error (\d+)\)", str(error))
        if code is None:
            raise
        raise OSError(int(code[1]), os.strerror(int(code[1])), str(path)) from error
    path.chmod(mode)  # safetensors renames a private temporary file into place: nobody else could read a shared model
