"""Sampling: what the seed, the temperature and top_k fix."""

import argparse

import pytest
import torch

from fmengine.commands.export import size
from fmengine.commands.generate import add_arguments
from fmengine.generate import load_model, sample
from fmengine.models.weights import from_seed
from support.models import tiny_config

MODEL = tiny_config(
    "neox",
    vocab_size=30,
    pad_vocab_to_multiple_of=32,
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=1,
    num_attention_heads=2,
    max_position_embeddings=8,
    rotary_pct=0.5,
)


def draw(seed: int = 0, temperature: float = 1.0, top_k: int = 0, count: int = 12, end: int | None = None) -> list[int]:
    model = load_model(MODEL, from_seed(MODEL, 0))
    return sample(model, [1, 2, 3], count, temperature=temperature, top_k=top_k, seed=seed, end=end)


def test_the_seed_fixes_the_sample_beyond_the_models_length() -> None:
    first = draw()
    assert len(first) == 12
    assert first == draw()
    assert first != draw(seed=1)
    assert max(draw(count=60)) < 30


def test_temperature_0_and_top_1_take_the_likeliest() -> None:
    assert draw(temperature=0) == draw(temperature=0, seed=5) == draw(top_k=1, seed=9)
    model = load_model(MODEL, from_seed(MODEL, 0))
    logits = model(torch.tensor([[1, 2, 3]]), torch.arange(3)[None], torch.tensor([0, 3], dtype=torch.int32))
    assert draw(temperature=0)[0] == int(logits[0, -1].argmax())


def test_the_end_token_ends_it() -> None:
    drawn = draw()
    end = drawn[4]
    assert draw(end=end) == drawn[: drawn.index(end)]


@pytest.mark.parametrize("words", [["--temperature", "-1"], ["--temperature", "nan"], ["--top-k", "0"]])
def test_arguments_that_make_no_sense(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    with pytest.raises(SystemExit):
        parser.parse_args(["run", *words])
    assert words[0] in capsys.readouterr().err


@pytest.mark.parametrize(("text", "number"), [("5GB", 5 * 10**9), ("500mb", 5 * 10**8), ("2 TB", 2 * 10**12)])
def test_sizes(text: str, number: int) -> None:
    assert size(text) == number


@pytest.mark.parametrize("text", ["5", "GB", "0GB", "-1GB", "5.5GB", "5PB"])
def test_odd_sizes(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        size(text)
