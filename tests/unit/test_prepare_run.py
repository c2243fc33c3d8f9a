"""What rank 0 does before the others are met: the run folder, the data, and where training goes on from."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from fmengine.checkpoint import store as store_module
from fmengine.checkpoint.collective import SingleProcess
from fmengine.checkpoint.manifest import Layout, describe
from fmengine.checkpoint.save import save
from fmengine.checkpoint.store import ParameterStore
from fmengine.config.batch import BatchSizes, solve
from fmengine.config.load import load
from fmengine.config.schema import Config
from fmengine.data import default
from fmengine.data.tokenizer import save_tokenizer, train_bpe
from fmengine.data.tokens import TokenReader
from fmengine.errors import UserError
from fmengine.models.registry import family_of
from fmengine.models.weights import from_seed
from fmengine.prepare_run import Start, prepare_run
from support.checkpoints import write_state
from support.data import write_documents

GLOBAL_BATCH = 4


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """A byte-level BPE of 300 tokens."""
    return train_bpe(["hello world " * 50], 300)


class Lab:
    """A run folder beside a data set and a tokenizer; configs over them, and starts."""

    def __init__(self, folder: Path, tokenizer: Tokenizer) -> None:
        self.folder, self.run = folder, folder / "run"
        self.run.mkdir()
        self.said: list[str] = []
        write_documents(folder / "data", [[1, 2, 3, 4] * 20], 300)
        save_tokenizer(tokenizer, folder / "tokenizer", "<|endoftext|>")

    def config(self, **sets: Any) -> Config:
        """A resolved config; `section__key=value` over what follows."""
        values = {
            "run.dir": self.run,
            "run.seed": 5,
            "model.family": "llama",
            "model.vocab_size": 300,
            "model.hidden_size": 16,
            "model.num_hidden_layers": 1,
            "model.num_attention_heads": 2,
            "data.train": self.folder / "data",
            "data.tokenizer": self.folder / "tokenizer",
            "data.sequence_length": 8,
            "batch.global_batch_size": GLOBAL_BATCH,
            "train.steps": 10,
            "train.precision": "fp32",
            **{key.replace("__", "."): value for key, value in sets.items()},
        }
        file = self.folder / "train.yaml"
        file.write_text("version: 1\n")
        return load(file, [f"{key}={value}" for key, value in values.items() if value is not None])

    def start(self, config: Config, *, world_size: int = 1, fresh: bool = False) -> Start:
        return prepare_run(config, sizes_of(config, world_size), world_size, fresh=fresh, say=self.said.append)

    def save(self, config: Config, step: int, world_size: int = 1) -> Path:
        """A checkpoint of `config` after `step` steps."""
        samples = step * sizes_of(config, world_size).global_batch_size
        header = describe(config, step=step, samples=samples, layout=Layout.of(config, world_size))
        return save(self.run, header, write_state(step), collective=SingleProcess(), keep=5)


def sizes_of(config: Config, world_size: int) -> BatchSizes:
    return solve(config.batch, world_size)


@pytest.fixture
def lab(tmp_path: Path, tokenizer: Tokenizer) -> Lab:
    return Lab(tmp_path, tokenizer)


class State:
    """Stands in for DeepSpeed's files: the weights of a seed, and moments made of them."""

    step = 6

    def __init__(self, config: Config) -> None:
        self.shapes = family_of(config.model).parameter_shapes(config.model)
        self.weight = from_seed(config.model, config.run.seed)

    def names(self) -> list[str]:
        return list(self.shapes)

    def moments(self, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        return self.weight(name) + 1, self.weight(name) + 2


def test_a_new_run(lab: Lab) -> None:
    config = lab.config()
    assert lab.start(config) == Start(config, None, None, 0)
    assert lab.said == []
    assert sorted(path.name for path in lab.run.iterdir()) == ["config.yaml", "tokenizer"]


def test_the_tokenizer_is_copied_so_that_transformers_loads_it(lab: Lab) -> None:
    from transformers import AutoTokenizer

    lab.start(lab.config())
    given, copied = lab.folder / "tokenizer", lab.run / "tokenizer"
    assert (copied / "tokenizer.json").read_bytes() == (given / "tokenizer.json").read_bytes()
    loaded = AutoTokenizer.from_pretrained(copied)
    assert loaded.eos_token == "<|endoftext|>"
    assert loaded.decode(loaded("hello world")["input_ids"]) == "hello world"


def test_no_tokenizer(lab: Lab) -> None:
    lab.start(lab.config(data__tokenizer=None))
    assert not (lab.run / "tokenizer").exists()


def test_a_tokenizer_without_an_end_is_refused(lab: Lab) -> None:
    tokenizer = Tokenizer.from_file(str(lab.folder / "tokenizer" / "tokenizer.json"))
    text = tokenizer.to_str().replace("<|endoftext|>", "[unknown]")
    (lab.folder / "tokenizer" / "tokenizer.json").write_text(text)
    (lab.folder / "tokenizer" / "tokenizer_config.json").unlink()
    with pytest.raises(UserError, match="nothing says which token ends a document"):
        lab.start(lab.config())


def test_without_data_it_is_the_standard_library(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    files = default._source_files
    monkeypatch.setattr(default, "_source_files", lambda root: files(root)[::20])
    config = lab.config(data__train=None, data__tokenizer=None, model__vocab_size=2048)
    start = lab.start(config)
    data = start.config.data
    assert data.train is not None
    assert data.train.is_relative_to(lab.run / "data")
    assert TokenReader(data.train).num_documents > 20
    assert data.tokenizer is not None
    assert Tokenizer.from_file(str(lab.run / "tokenizer" / "tokenizer.json")).get_vocab_size() == 2048
    assert len(lab.said) == 1
    assert "standard library" in lab.said[0]
    assert start.config.model_copy(update={"data": config.data}) == config


@pytest.mark.parametrize("vocab_size", [2047, 300])
def test_the_standard_library_takes_a_vocabulary_worth_the_name(lab: Lab, vocab_size: int) -> None:
    config = lab.config(data__train=None, data__tokenizer=None, model__vocab_size=vocab_size)
    with pytest.raises(UserError, match="at least 2048"):
        lab.start(config)


def test_the_config_in_the_run_folder_reads_back_equal(lab: Lab) -> None:
    start = lab.start(lab.config(deepspeed="{wall_clock_breakdown: false}", optimizer__learning_rate=1e-5))
    assert load(lab.run / "config.yaml") == start.config


def test_the_written_config_is_that_of_the_last_start(lab: Lab) -> None:
    lab.start(lab.config())
    lab.start(lab.config(train__steps=77))
    assert load(lab.run / "config.yaml").train.steps == 77


def test_it_goes_on_from_the_newest_whole_checkpoint(lab: Lab) -> None:
    config = lab.config()
    lab.save(config, 3)
    newest = lab.save(config, 6)
    assert lab.start(config) == Start(config, newest, None, 6)
    assert lab.said == []


def test_a_broken_checkpoint_is_passed_over_aloud(lab: Lab, caplog: pytest.LogCaptureFixture) -> None:
    config = lab.config()
    older = lab.save(config, 3)
    file = lab.save(config, 6) / "engine" / "state" / "rank-0.pt"
    file.write_bytes(file.read_bytes()[:-1] + b"?")  # of the same size: only its digest tells
    assert lab.start(config) == Start(config, older, None, 3)
    assert "passed over a broken checkpoint" in caplog.text


@pytest.mark.parametrize(
    ("sets", "world_size", "said"),
    [
        ({}, 2, "world_size 1 -> 2"),
        ({"parallel__zero_stage": 3}, 1, "zero_stage 1 -> 3"),
        ({"train__precision": "bf16"}, 1, "precision fp32 -> bf16"),
        ({"parallel__tensor_parallel_size": 2}, 2, "world_size 1 -> 2, tensor 1 -> 2"),
    ],
)
def test_another_layout_goes_through_a_store(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, sets: dict[str, Any], world_size: int, said: str
) -> None:
    config = lab.config()
    checkpoint = lab.save(config, 6)
    state = State(config)
    monkeypatch.setattr(store_module, "open_state", lambda *_: state)
    start = lab.start(lab.config(**sets), world_size=world_size)
    assert (start.checkpoint, start.step) == (checkpoint, 6)
    assert lab.said == [f"step-00000006 was written at another layout ({said}): converting it"]
    assert start.store == lab.run / "converted" / "step-00000006"
    store = ParameterStore(start.store)
    assert store.step == 6
    assert sorted(store.names()) == sorted(state.shapes)
    for name in state.shapes:
        assert torch.equal(store.weight(name), state.weight(name))
        for ours, theirs in zip(store.moments(name), state.moments(name), strict=True):
            assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    ("sets", "complaint"),
    [
        ({"run__seed": 6}, r"run\.seed: 6, but .*step-00000006 was trained with 5, .*; set it to 5"),
        ({"data__sequence_length": 4}, r"data\.sequence_length: 4, but .* with 8, .*; set it to 8"),
        ({"batch__global_batch_size": 8}, r"batch\.global_batch_size: 8, but .* with 4, .*; set it to 4"),
    ],
)
def test_what_would_change_the_order_of_the_samples_is_refused(lab: Lab, sets: dict[str, Any], complaint: str) -> None:
    lab.start(lab.config())
    written = (lab.run / "config.yaml").read_text()
    lab.save(lab.config(), 6)
    with pytest.raises(UserError, match=complaint) as error:
        lab.start(lab.config(**sets))
    assert len(error.value.problems) == 1
    assert (lab.run / "config.yaml").read_text() == written


def test_all_of_it_at_once(lab: Lab) -> None:
    lab.save(lab.config(), 6)
    with pytest.raises(UserError) as error:
        lab.start(lab.config(run__seed=6, data__sequence_length=4, batch__global_batch_size=8))
    assert [problem.split(":")[0] for problem in error.value.problems] == [
        "run.seed",
        "data.sequence_length",
        "batch.global_batch_size",
    ]


def test_a_global_batch_that_follows_from_the_world_size_is_compared_too(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = lab.config(batch__global_batch_size=None, batch__micro_batch_size=2)
    lab.save(config, 6, world_size=2)
    monkeypatch.setattr(store_module, "open_state", lambda *_: State(config))
    with pytest.raises(UserError, match=r"batch\.global_batch_size: 2, but .* with 4"):
        lab.start(config, world_size=1)


def test_another_model_is_refused(lab: Lab) -> None:
    lab.save(lab.config(), 6)
    with pytest.raises(UserError, match=r"another model: .*model\.hidden_size is 16 there and 32 here"):
        lab.start(lab.config(model__hidden_size=32))
    with pytest.raises(UserError, match=r"model\.family is 'llama' there and 'neox' here"):
        lab.start(lab.config(model__family="neox"))


def test_other_changes_are_logged_and_taken(lab: Lab, caplog: pytest.LogCaptureFixture) -> None:
    lab.save(lab.config(), 6)
    caplog.set_level(logging.INFO, "fmengine")
    start = lab.start(lab.config(optimizer__learning_rate=0.5))
    assert start.step == 6
    assert start.config.optimizer.learning_rate == 0.5
    assert "changed since the checkpoint: optimizer.learning_rate 0.0003 -> 0.5" in caplog.text


def test_fresh_puts_aside_and_loses_nothing(lab: Lab) -> None:
    config = lab.config()
    for _ in range(2):  # twice in one second too
        lab.save(config, 6)
        (lab.run / "metrics.jsonl").write_text("{}\n")
        assert lab.start(config, fresh=True) == Start(config, None, None, 0)
        assert not (lab.run / "checkpoints").exists()
        assert not (lab.run / "metrics.jsonl").exists()
    aside = sorted(path for path in lab.run.iterdir() if path.name.startswith("checkpoints-until-"))
    assert len(aside) == 2
    for folder in aside:
        assert (folder / "step-00000006" / "COMPLETE").is_file()
        assert (folder / "metrics.jsonl").is_file()


def test_fresh_takes_up_a_changed_model_and_seed(lab: Lab) -> None:
    lab.save(lab.config(), 6)
    changed = lab.config(model__hidden_size=32, run__seed=6)
    assert lab.start(changed, fresh=True) == Start(changed, None, None, 0)


def test_fresh_where_there_is_nothing(lab: Lab) -> None:
    config = lab.config()
    assert lab.start(config, fresh=True) == Start(config, None, None, 0)
