"""The default run as a user sees it: the command on real text, the export, Transformers, a sample.

What is held against it is Transformers alone: the exported folder's own model and tokenizer, one document at a time.
"""

import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fmengine.batch import IGNORE_INDEX
from fmengine.config.load import load
from fmengine.config.schema import Config
from fmengine.data.loader import EvalLoader, split_documents
from fmengine.data.tokens import TokenReader
from fmengine.models.resolved import known
from fmengine.parallel import Topology
from support.faults import LAUNCHER

LIMIT = 1500
"""Seconds for one command; there so that a hang ends, not to measure."""

NEOX = "model.family=neox"
RUNS = ["llama", "short_neox", pytest.param("neox", marks=pytest.mark.slow)]


def fmengine(folder: Path, *arguments: str) -> str:
    """What a command in a folder prints on standard output; it must end well."""
    taken = {*LAUNCHER, "OMP_NUM_THREADS", "MKL_NUM_THREADS"}  # it has all of the machine's cores
    environment = {key: value for key, value in os.environ.items() if key not in taken}
    done = subprocess.run(
        [sys.executable, "-m", "fmengine", *arguments],
        cwd=folder,
        env=environment | {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout


class Run:
    """A run of `fmengine train` with no config, exported and loaded by Transformers.

    Args:
        folder: where the commands run.
        sets: `--set` arguments beside the run folder.
    """

    def __init__(self, folder: Path, *sets: str) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self.folder, self.dir, self.export = folder, folder / "run", folder / "export"
        fmengine(folder, "train", *(word for one in ("run.dir=run", *sets) for word in ("--set", one)))
        self.reported = fmengine(folder, "export", "run", "--out", "export")
        self.model: Any = AutoModelForCausalLM.from_pretrained(self.export, dtype=torch.float32).eval()
        self.tokenizer: Any = AutoTokenizer.from_pretrained(self.export)

    @property
    def config(self) -> Config:
        """As the run wrote it down."""
        return load(self.dir / "config.yaml")

    def rows(self, kind: str) -> list[dict[str, Any]]:
        """Rows of metrics.jsonl."""
        rows = [json.loads(line) for line in (self.dir / "metrics.jsonl").read_text().splitlines()]
        return [row for row in rows if row["kind"] == kind]

    def bits_per_byte(self) -> dict[int, float]:
        """Of the held-out text, by step."""
        return {row["step"]: row["bits_per_byte"] for row in self.rows("eval")}

    def held_out(self) -> tuple[TokenReader, range]:
        """The text's tokens, and which documents were kept from training."""
        data = self.config.data
        reader = TokenReader(self.folder / known(data.train))
        return reader, split_documents(reader, data.validation_fraction)[1]


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The default run, whole."""
    return Run(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="session")
def short_neox(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """40 steps of the other family."""
    return Run(tmp_path_factory.mktemp("short-neox"), NEOX, "train.steps=40")


@pytest.fixture(scope="session")
def neox(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The other family, whole."""
    return Run(tmp_path_factory.mktemp("neox"), NEOX)


@pytest.fixture
def run(request: pytest.FixtureRequest) -> Run:
    """The run that a test names."""
    found: Run = request.getfixturevalue(request.param)
    return found


each_run = pytest.mark.parametrize("run", RUNS, indirect=True)


def segments(run: Run) -> Iterator[tuple[Tensor, Tensor]]:
    """The validation windows document by document: the tokens that go in and the ones to be predicted, int64 [T]."""
    reader, documents = run.held_out()
    config = run.config
    loader = EvalLoader(
        reader,
        documents=documents,
        sequence_length=config.data.sequence_length,
        eval_samples=config.train.eval_samples,
        micro_batch_size=1,
        topology=Topology(0, 1),
        vocab_size=known(config.model.vocab_size),
    )
    for batch in loader:
        starts = (batch.position_ids[0] == 0).nonzero().flatten().tolist()
        for start, stop in zip(starts, [*starts[1:], batch.input_ids.shape[1]], strict=True):
            yield batch.input_ids[0, start:stop], batch.targets[0, start:stop]


@torch.no_grad()
def bits_per_byte_by_transformers(run: Run) -> float:
    """Cross entropy by Transformers' model over bytes of text by Transformers' tokenizer."""
    nats = size = 0.0
    for ids, targets in segments(run):
        logits = run.model(input_ids=ids[None]).logits[0]
        nats += float(torch.nn.functional.cross_entropy(logits, targets, ignore_index=IGNORE_INDEX, reduction="sum"))
        text = run.tokenizer.decode(targets[targets != IGNORE_INDEX], skip_special_tokens=True)
        size += len(text.encode())
    return nats / math.log(2) / size


@pytest.mark.parametrize("run", ["llama", pytest.param("neox", marks=pytest.mark.slow)], indirect=True)
def test_the_default_run_learns_real_text(run: Run) -> None:
    found = run.bits_per_byte()
    steps = run.config.train.steps
    assert 3.0 < found[0] < 4.5
    assert found[steps] < 2.3
    assert found[steps] == min(found.values())
    assert [row["step"] for row in run.rows("train")] == list(range(1, steps + 1))


@pytest.mark.parametrize("run", ["short_neox"], indirect=True)
def test_a_few_steps_of_neox_learn_already(run: Run) -> None:
    found = run.bits_per_byte()
    assert 3.0 < found[0] < 4.5
    assert found[40] < 0.8 * found[0]


@each_run
def test_the_vocabulary_is_worth_the_name(run: Run) -> None:
    assert len(run.tokenizer) == run.model.config.vocab_size >= 2048
    reader, documents = run.held_out()
    used = set()
    for document in documents:
        used |= set(reader.tokens(reader.document_start(document), reader.document_start(document + 1)).tolist())
    assert len(used) > 2048, "of which the held-out text alone uses this many"


@each_run
def test_transformers_reads_the_family_and_the_tokens(run: Run) -> None:
    family = known(run.config.model.family)
    assert run.model.config.model_type == {"llama": "llama", "neox": "gpt_neox"}[family]
    reader, documents = run.held_out()
    for document in documents[:3]:
        tokens = reader.tokens(reader.document_start(document), reader.document_start(document + 1)).tolist()
        assert tokens[-1] == run.tokenizer.eos_token_id
        text = run.tokenizer.decode(tokens[:-1])
        assert len(text) > len(tokens)
        assert run.tokenizer(text)["input_ids"] == tokens[:-1]


@each_run
def test_the_export_was_verified(run: Run) -> None:
    assert "not verified" not in run.reported
    assert run.reported.splitlines()[-1] == "exported   export"


@each_run
def test_transformers_finds_the_same_bits_per_byte(run: Run) -> None:
    ours = run.bits_per_byte()[run.config.train.steps]
    assert bits_per_byte_by_transformers(run) == pytest.approx(ours, rel=0.01)


@each_run
def test_a_sample(run: Run) -> None:
    text = fmengine(run.folder, "generate", "run", "--prompt", "def main(", "--max-new-tokens", "24")
    assert text.startswith("def main(")
    assert len(text.strip()) > len("def main(") + 10
