"""A mistake in what a user gives, through the real commands: its line on stderr, exit code 2, nothing left behind."""

import gzip
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from support.data import write_documents
from support.faults import CONFIG, VOCAB, Done, Zygote, command_environment


def refused(done: Done, *lines: str, usage: bool = False) -> None:
    """Exit code 2 and as many error lines as `lines`, each with its text in it."""
    assert done.code == 2, done.stderr
    assert "Traceback" not in done.stderr
    found = [line for line in done.stderr.splitlines() if ": error: " in line or not usage]
    assert len(found) == len(lines), done.stderr
    for line, text in zip(found, lines, strict=True):
        assert line.startswith("fmengine: error: " if not usage else "fmengine")
        assert text in line


def sets(*values: str) -> list[str]:
    return [argument for value in values for argument in ("--set", value)]


def fmengine(folder: Path, *arguments: str) -> Done:
    """The command in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "fmengine", *arguments],
        cwd=folder,
        env=command_environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    return Done(done.returncode, done.stdout, done.stderr)


def test_every_command_in_a_process_of_its_own(folder: Path) -> None:
    (folder / "rows.jsonl").write_text('{"text": "a"}\n{"text": "b"\n')
    refused(
        fmengine(folder, "prepare", "rows.jsonl", "--tokenizer", "tokenizer", "--out", "p"), "rows.jsonl:2: malformed"
    )
    refused(fmengine(folder, "train", "train.yaml", *sets("data.train=gone")), "data.train: gone.idx: no such file")
    refused(fmengine(folder, "validate", "train.yaml", *sets("data.train=gone")), "data.train: gone.idx: no such file")
    refused(fmengine(folder, "export", "tokenizer", "--out", "model"), "tokenizer: no whole checkpoint in it")
    refused(fmengine(folder, "generate", "gone"), "gone: no such folder")


LONG = "n" * 300


@pytest.mark.parametrize(
    ("values", "text"),
    [
        (["train.steps=-4"], "train.steps: must be above 0, not -4"),
        (["train.steps=1e3"], "train.steps: must be a whole number, not 1000.0"),
        (["optimizer.learning_rate=.nan"], "optimizer.learning_rate: must be a finite number, not NaN"),
        (["optimizer.learning_rate=1e400"], "optimizer.learning_rate: must be a finite number, not Infinity"),
        (["optimizer.learning_rate=1e38"], "optimizer.learning_rate: must be 1000.0 or less"),
        (["train.steps"], "--set train.steps: must be KEY=VALUE"),
        (["=5"], "--set =5: must be KEY=VALUE"),
        (["train=5"], "train: must be a section"),
        (["train.steps.x=5"], "train.steps is a value, not a section"),
        (["train.steps=[5"], "--set train.steps=[5: not YAML"),
        (["train.stepps=5"], "train.stepps: no such key; did you mean steps?"),
        (["data.train=data.bin"], "data.train: data.bin.idx: no such file; give the common prefix"),
        (["data.train=loop"], "data.train: loop.idx: no such file"),
        ([f"data.train={LONG}"], "File name too long"),
        ([f"data.tokenizer={LONG}"], "File name too long"),
        ([f"model.pretrained={LONG}"], "File name too long"),
        ([f"run.dir={LONG}"], "run.dir: File name too long"),
        (["run.dir="], "run.dir: must be text, not empty"),
        (["run.dir=''"], "run.dir: must be a path, not empty"),
        (["run.dir=~/run"], "run.dir: ~ means nothing here"),
        (['run.dir="a\\0b"'], "a NUL or half a surrogate pair"),
        (['run.dir="a\\ud800b"'], "a NUL or half a surrogate pair"),
        (["run.dir=train.yaml"], "train.yaml is a file, not a folder"),
        (["run.dir=train.yaml/run"], "train.yaml is a file, not a folder"),
        (["data.tokenizer=gone"], "data.tokenizer: gone: no such file"),
        (["data.tokenizer=train.yaml"], "data.tokenizer: train.yaml: not a tokenizer that"),
        (["model.vocab_size=64"], f"model.vocab_size: 64, but tokenizer has ids up to {VOCAB - 1}"),
        (["data.sequence_length=100000"], "a sample needs 100001; add text or shorten data.sequence_length"),
        (["data.sequence_length=900", "data.validation_fraction=0.1"], "held-out documents hold"),
        (["data.train=one", "data.validation_fraction=0.1"], "data.validation_fraction: one has one document"),
    ],
)
def test_a_config_is_refused_before_anything_is_made(
    zygote: Zygote, folder: Path, values: list[str], text: str
) -> None:
    write_documents(folder / "one", [list(range(100))], VOCAB)
    (folder / "loop").symlink_to("loop")
    before = sorted(folder.rglob("*"))
    done = zygote.run(folder, "train", "train.yaml", *sets(*values))
    refused(done, text)
    assert sorted(set(folder.rglob("*")) - {folder / "stdout", folder / "stderr"}) == before


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"", "w.yaml: holds no config"),
        (b"- a\n- b\n", "w.yaml:1: must be sections"),
        (b"run:\n\tdir: x\n", "w.yaml:2: not YAML"),
        (b"run: {dir: x\nmodel: {}\n", "w.yaml:2: not YAML"),
        (b"run: !!python/object:os.system {}\n", "w.yaml:1: tags (!name) are not read here"),
        (b"a: &x {b: 1}\nrun: *x\n", "w.yaml:2: aliases (*name) are not read here"),
        (b"a: 1\n---\na: 2\n", "w.yaml:2: a second document"),
        (b"run: " + b"[" * 5000, "w.yaml:1: nested deeper"),
        (b"run: {dir: \xff}\n", "w.yaml:1: byte 0xff is not UTF-8"),
        (b"run: {dir: a\x01}\n", "w.yaml: not YAML: unacceptable character"),
    ],
)
def test_a_file_that_is_no_config(zygote: Zygote, folder: Path, content: bytes, text: str) -> None:
    (folder / "w.yaml").write_bytes(content)
    refused(zygote.run(folder, "validate", "w.yaml"), text)


def test_five_mistakes_are_five_lines(zygote: Zygote, folder: Path) -> None:
    text = CONFIG.replace("dir: run", "dirr: run").replace("llama", "lama").replace("bf16", "bf61")
    text = text.replace("global_batch_size: 4", "global_batch_size: four") + "train: {steps: 5}\n"
    (folder / "w.yaml").write_text(text)
    for command in ("validate", "train"):
        refused(
            zygote.run(folder, command, "w.yaml"),
            "w.yaml:1: run.dirr: no such key; did you mean dir?",
            "w.yaml:2: model.family: must be 'llama' or 'neox'",
            "w.yaml:4: batch.global_batch_size: must be a whole number",
            "w.yaml:6: train.precision: must be",
            "w.yaml:8: train: given twice, first in line 6",
        )
    assert not (folder / "run").exists()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["trian", "train.yaml"], "invalid choice: 'trian'"),
        (["train", "train.yaml", "--worker", "2"], "unrecognized arguments: --worker 2"),
        (["train", "train.yaml", "--workers", "0"], "argument --workers: 0 is not 1 or more"),
        (["validate", "train.yaml", "--world-size", "three"], "argument --world-size: invalid whole number"),
        (["export", "run"], "the following arguments are required: --out"),
        (["export", "run", "--out", "x", "--max-shard-size", "5"], "5 is not a size such as 500MB"),
        (["generate", "run", "--temperature", "nan"], "nan is not 0 or more"),
    ],
)
def test_a_command_line_that_does_not_parse(zygote: Zygote, folder: Path, arguments: list[str], text: str) -> None:
    refused(zygote.run(folder, *arguments), text, usage=True)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["train", "tokenizer"], "tokenizer: cannot be read: Is a directory"),
        (["train", "gone.yaml"], "gone.yaml: no such file; give a config file, or the name of a shipped recipe"),
        (["train", LONG], "File name too long"),
        (["export", LONG, "--out", "x"], "File name too long"),
        (["prepare", "text.txt", "--tokenizer", "tokenizer", "--out", LONG], "File name too long"),
        (["prepare", "text.txt", "--tokenizer", "gone", "--out", "p"], "gone: no such file"),
        (["prepare", "text.txt", "--tokenizer", "train.yaml", "--out", "p"], "train.yaml: not a tokenizer"),
        (["prepare", "train.yaml", "--tokenizer", "tokenizer", "--out", "p"], "train.yaml: unknown kind of file"),
        (["prepare", "tokenizer", "--tokenizer", "tokenizer", "--out", "p"], "tokenizer: a folder"),
        (["prepare", "text.txt", "--tokenizer", "tokenizer", "--out", "p", "--eod", "gone"], "--eod: 'gone' is not"),
        (["generate", "train.yaml"], "train.yaml: no such folder; give a run folder"),
    ],
)
def test_a_path_that_is_not_what_it_should_be(zygote: Zygote, folder: Path, arguments: list[str], text: str) -> None:
    (folder / "text.txt").write_text("hello")
    refused(zygote.run(folder, *arguments), text)


@pytest.mark.parametrize(
    ("name", "content", "text"),
    [
        ("rows.jsonl", b'{"text": "a"}\n{"text": "b"\n', "rows.jsonl:2: malformed JSON"),
        ("rows.jsonl", b'{"text": "a"}\n{"txt": "b"}\n', "rows.jsonl:2: no key 'text'"),
        ("rows.jsonl", b'{"text": "a"}\n\n{"text": 5}\n', "rows.jsonl:3: 'text' is a number"),
        ("rows.jsonl", b"", "the input holds no document"),
        ("text.txt", b"abc\n\xff", "text.txt:2: not UTF-8"),
        ("rows.jsonl.gz", b"no gzip", "rows.jsonl.gz:1: the file cannot be read on"),
        ("rows.jsonl.gz", gzip.compress(b'{"text": "a"}\n' * 1000)[:-20], "the file cannot be read on: truncated"),
        ("rows.jsonl.zst", b"no zstandard", "rows.jsonl.zst:1: the file cannot be read on"),
    ],
)
def test_prepare_leaves_nothing(zygote: Zygote, folder: Path, name: str, content: bytes, text: str) -> None:
    (folder / name).write_bytes(content)
    refused(zygote.run(folder, "prepare", name, "--tokenizer", "tokenizer", "--out", "made/here/data"), text)
    assert not (folder / "made").exists()


def test_a_token_beyond_the_vocabulary(zygote: Zygote, folder: Path) -> None:
    write_documents(folder / "big", [[1] * 40, [2] * 30 + [VOCAB] + [2] * 40], 1000)
    done = zygote.run(folder, "train", "train.yaml", *sets("data.train=big"))
    refused(done, f"big.bin: document 1, position 30: token id {VOCAB} is not below the vocabulary's {VOCAB}")
    assert not (folder / "run" / "checkpoints").exists()


def test_a_token_that_the_second_of_two_workers_meets(folder: Path) -> None:
    """Its line is there, and no traceback of the worker that it leaves alone."""
    write_documents(folder / "big", [[1] * 40] * 20 + [[VOCAB] * 40], 1000)
    done = fmengine(folder, "train", "train.yaml", "--workers", "2", *sets("data.train=big", "train.steps=100"))
    assert done.code == 2
    lines = [line for line in done.stderr.splitlines() if not line.startswith(("fmengine: rank ", "rank "))]
    assert lines
    assert all(f"token id {VOCAB} is not below the vocabulary's {VOCAB}" in line for line in lines), done.stderr


@pytest.mark.parametrize(
    ("suffix", "size", "text"),
    [
        ("bin", 100, "data.bin: truncated: 100 bytes where data.idx says"),
        ("bin", 0, "data.idx: the data set is empty"),
        ("idx", 60, "data.idx: truncated: 60 bytes"),
        ("idx", 10, "data.idx: not an index of Megatron's .bin/.idx format, or truncated"),
        ("idx", 0, "data.idx: not an index of Megatron's .bin/.idx format, or truncated"),
    ],
)
def test_truncated_token_data(zygote: Zygote, folder: Path, suffix: str, size: int, text: str) -> None:
    os.truncate(folder / f"data.{suffix}", size)
    for command in ("train", "validate"):
        refused(zygote.run(folder, command, "train.yaml"), text)
    assert not (folder / "run").exists()


@pytest.fixture(scope="session")
def exported(zygote: Zygote, trained: Path) -> Path:
    """The finished run's model in Hugging Face's form, with its tokenizer."""
    assert zygote.run(trained.parent, "export", "run", "--out", "model").code == 0
    return trained.parent / "model"


def rewrite(name: str, change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def damage(model: Path) -> None:
        (model / name).write_bytes(change((model / name).read_bytes()))

    return damage


def say(**keys: object) -> Callable[[Path], None]:
    return rewrite("config.json", lambda old: json.dumps({**json.loads(old), **keys}).encode())


def header(text: bytes) -> Callable[[Path], None]:
    return rewrite("model.safetensors", lambda _: len(text).to_bytes(8, "little") + text)


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (rewrite("model.safetensors", lambda old: old[:-1]), "model.safetensors: cut short"),
        (rewrite("model.safetensors", lambda old: old[: len(old) // 2]), "model.safetensors: cut short"),
        (rewrite("model.safetensors", lambda old: old[:100]), "model.safetensors: cut short inside its header"),
        (rewrite("model.safetensors", lambda _: b""), "model.safetensors: no safetensors file"),
        (header(b"[]"), "model.safetensors: no safetensors file"),
        (header(b'{"a": 1}'), "model.safetensors: no safetensors file"),
        (header(b'{"a": {"b": 1}}'), "model.safetensors: no safetensors file"),
        (lambda model: (model / "model.safetensors").unlink(), "model.safetensors: no such file"),
        (lambda model: (model / "config.json").unlink(), "config.json: no such file"),
        (rewrite("config.json", lambda _: b"{"), "config.json: cannot be read as JSON"),
        (rewrite("config.json", lambda _: b"[]"), "config.json: not a JSON object"),
        (say(model_type="gpt2"), "model_type 'gpt2' is not supported"),
        (say(num_hidden_layers=3), "tensor model.layers.2.input_layernorm.weight is in none"),
        (say(rms_norm_eps=float("nan")), "config.json: rms_norm_eps: must be a finite number"),
    ],
)
def test_a_damaged_pretrained_model(
    zygote: Zygote, folder: Path, exported: Path, damage: Callable[[Path], None], text: str
) -> None:
    shutil.copytree(exported, folder / "model")
    damage(folder / "model")
    section = "model: {family: llama, hidden_size: 32, num_hidden_layers: 2, num_attention_heads: 4}"
    assert section in CONFIG
    (folder / "train.yaml").write_text(CONFIG.replace(section, "model: {pretrained: model}"))
    refused(zygote.run(folder, "train", "train.yaml"), text)
    assert not (folder / "run").exists()
