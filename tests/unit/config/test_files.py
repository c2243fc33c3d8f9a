import errno
import json
import os
import shutil
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
from tokenizers import Tokenizer, models

from fmengine.config.files import input_problems, output_problems
from fmengine.config.load import load
from fmengine.config.schema import Config
from fmengine.config.size import checkpoint_bytes, human
from support.data import write_documents


def config(folder: Path, *sets: str) -> Config:
    return load(None, [f"run.dir={folder / 'runs' / 'a'}", *sets])


def mistakes(config: Config) -> list[tuple[str, str]]:
    found = input_problems(config) + output_problems(config)
    return [(".".join(map(str, one.key)), one.text) for one in found]


def test_the_default_run_needs_no_file_and_leaves_none(tmp_path: Path) -> None:
    assert mistakes(config(tmp_path)) == []
    assert [*tmp_path.iterdir()] == []


def test_data_that_is_whole(tmp_path: Path) -> None:
    write_documents(tmp_path / "corpus", [[1] * 300])
    assert (
        mistakes(config(tmp_path, f"data.train={tmp_path / 'corpus'}", f"data.validation={tmp_path / 'corpus'}")) == []
    )


@pytest.mark.parametrize("name", ["train", "validation"])
def test_data_that_is_missing_truncated_or_short(tmp_path: Path, name: str) -> None:
    prefix = tmp_path / "corpus"
    wanted = config(tmp_path, f"data.{name}={prefix}")
    write_documents(prefix, [[1] * 300])
    complete = prefix.with_suffix(".bin").read_bytes()
    prefix.with_suffix(".bin").write_bytes(complete[:-1])
    ((key, text),) = mistakes(wanted)
    assert (key, "truncated" in text) == (f"data.{name}", True)
    prefix.with_suffix(".bin").write_bytes(b"")
    assert "empty" in mistakes(wanted)[0][1]
    prefix.with_suffix(".bin").unlink()
    assert "no such file" in mistakes(wanted)[0][1]
    write_documents(prefix, [[1] * 100, [2] * 156])
    assert "holds 256 tokens, a sample needs 257" in mistakes(wanted)[0][1]


def test_a_tokenizer_larger_than_the_vocabulary(tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.json"
    Tokenizer(models.WordLevel({"a": 0, "b": 4096}, unk_token="a")).save(str(file))
    wanted = config(tmp_path, f"data.tokenizer={file}")
    ((key, text),) = mistakes(wanted)
    assert key == "model.vocab_size"
    assert f"4096, but {file} has ids up to 4096; set it to 4097" in text
    assert mistakes(config(tmp_path, f"data.tokenizer={file}", "model.vocab_size=4097")) == []
    file.unlink()
    assert mistakes(wanted)[0][0] == "data.tokenizer"


def test_pretrained_weights_that_are_missing_or_cut_short(tmp_path: Path) -> None:
    sizes = {"vocab_size": 8, "hidden_size": 4, "intermediate_size": 8, "max_position_embeddings": 256}
    sizes |= {"num_hidden_layers": 1, "num_attention_heads": 2}
    folder = tmp_path / "hf"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"} | sizes))
    file = tmp_path / "train.yaml"
    file.write_text(f"model: {{pretrained: {folder}}}\nrun: {{dir: {tmp_path / 'run'}}}\n")
    ((key, text),) = mistakes(load(file))
    assert key == "model.pretrained"
    assert "no such file" in text
    (folder / "model.safetensors").write_bytes((10**6).to_bytes(8, "little") + b"{")
    assert "cut short" in mistakes(load(file))[0][1]


def test_a_run_folder_below_a_file(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("")
    ((key, text),) = mistakes(config(tmp_path))
    assert key == "run.dir"
    assert "is a file" in text


@pytest.mark.parametrize("name", ["lr[3e-4]", "run*", "run?"])
def test_a_run_folder_whose_checkpoints_deepspeed_would_not_find_again(tmp_path: Path, name: str) -> None:
    ((key, text),) = mistakes(config(tmp_path, f"run.dir='{tmp_path / name}'"))
    assert key == "run.dir"
    assert "without *, ? and [" in text


@pytest.mark.parametrize("code", [errno.EACCES, errno.EROFS, errno.ENOSPC, errno.EDQUOT])
def test_a_run_folder_that_takes_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    def refuse(**_: Any) -> NoReturn:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
    ((key, text),) = mistakes(config(tmp_path))
    assert key == "run.dir"
    assert f"cannot write in {tmp_path}: {os.strerror(code)}" in text


def test_a_disk_without_room_for_one_checkpoint_more_than_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = checkpoint_bytes(config(tmp_path).model, config(tmp_path).train)

    def free(amount: int) -> None:
        monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=amount))

    free(3 * one)
    assert mistakes(config(tmp_path)) == []
    free(3 * one - 1)
    ((key, text),) = mistakes(config(tmp_path))
    assert key == "run.dir"
    assert f"3 checkpoints of {human(one)}" in text
    assert mistakes(config(tmp_path, "checkpoint.keep=1")) == []


def test_checkpoints_that_are_there_count_as_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = config(tmp_path)
    needed = 3 * checkpoint_bytes(wanted.model, wanted.train)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=needed - 100))
    assert len(mistakes(wanted)) == 1
    step = wanted.run.dir / "checkpoints" / "step-00000001"
    step.mkdir(parents=True)
    (step / "state").write_bytes(b"x" * 100)
    assert mistakes(wanted) == []
