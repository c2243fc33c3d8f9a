import os
from pathlib import Path

import pytest
import torch

from fmengine.checkpoint.tensors import save_tensors


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o002, 0o664), (0o077, 0o600)])
def test_files_are_as_readable_as_the_umask_lets_them_be(tmp_path: Path, umask: int, mode: int) -> None:
    before = os.umask(umask)
    try:
        save_tensors({"a": torch.zeros(3)}, tmp_path / "model.safetensors")
    finally:
        os.umask(before)
    assert (tmp_path / "model.safetensors").stat().st_mode & 0o777 == mode
