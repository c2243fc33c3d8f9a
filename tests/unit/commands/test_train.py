"""What is refused before there is a run folder, and said once."""

import os
import sys
from pathlib import Path

import pytest

from fmengine import cli
from support.configs import MODEL, write_config
from support.data import write_documents


@pytest.mark.parametrize("workers", [1, 2])
def test_fp16_on_a_cpu_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], workers: int
) -> None:
    """DeepSpeed 0.19.8 raises in the middle of its own start."""
    monkeypatch.setattr(os, "environ", os.environ | {"CUDA_VISIBLE_DEVICES": ""})  # the command adds variables
    write_documents(tmp_path / "data", [[1, 2, 3, 4] * 20], 512)
    sets = [
        f"run.dir={tmp_path / 'run'}",
        f"data.train={tmp_path / 'data'}",
        "data.sequence_length=8",
        "batch.global_batch_size=2",
        "train.precision=fp16",
        "train.steps=2",
    ]
    config = write_config(tmp_path, MODEL)
    arguments = ["train", str(config), "--workers", str(workers)]
    arguments += [word for value in sets for word in ("--set", value)]
    monkeypatch.setattr(sys, "argv", ["fmengine", *arguments])  # what workers would be started with
    code = cli.main(arguments)
    printed = capfd.readouterr()
    assert code == 2
    assert printed.err == (
        "fmengine: error: --set train.precision=fp16: train.precision: DeepSpeed does not run fp16 on a CPU; "
        "use bf16 or fp32\n"
    )
    assert not (tmp_path / "run").exists()
