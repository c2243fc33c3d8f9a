from pathlib import Path

import pytest

from fmengine.config.load import load
from fmengine.config.model import ModelConfig
from fmengine.config.schema import TrainConfig
from fmengine.config.size import checkpoint_bytes, count_parameters, human
from support.configs import PINNED


@pytest.mark.parametrize(
    ("recipe", "parameters"),
    [  # as counted in the released weights (their model cards)
        ("llama-7b", 6_738_415_616),
        ("llama-3-8b", 8_030_261_248),
        ("pythia-1.4b", 1_414_647_808),
        ("gpt-neox-20b", 20_554_567_680),
    ],
)
def test_published_models_have_their_published_size(recipe: str, parameters: int) -> None:
    assert count_parameters(load(Path(recipe)).model) == parameters


@pytest.mark.parametrize(
    ("sets", "more"),
    [
        (["model.tie_word_embeddings=true"], -4096 * 256),
        (["model.attention_bias=true"], 4 * (3 * 256 + 256)),
        (["model.mlp_bias=true"], 4 * (2 * 768 + 256)),
        (["model.num_key_value_heads=2"], -4 * 2 * 6 * 32 * 256),
        (["model.head_dim=64"], 4 * 4 * 256 * 8 * 32),
    ],
)
def test_options_change_the_count(sets: list[str], more: int) -> None:
    assert count_parameters(load(None, [*PINNED, *sets]).model) == count_parameters(load(None, PINNED).model) + more


def test_checkpoints_are_weights_master_copy_and_two_moments() -> None:
    model = ModelConfig(
        family="neox",
        vocab_size=10,
        hidden_size=4,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=1,
        attention_bias=True,
    )
    assert checkpoint_bytes(model, TrainConfig(precision="fp32")) == 16 * count_parameters(model)
    assert checkpoint_bytes(model, TrainConfig(precision="bf16")) == 14 * count_parameters(model)


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0 B"), (999, "999 B"), (1500, "1.5 kB"), (88.1e6, "88.1 MB"), (3e15, "3e+03 TB")]
)
def test_sizes_are_readable(size: float, text: str) -> None:
    assert human(size) == text
