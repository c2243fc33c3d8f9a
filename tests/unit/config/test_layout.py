import pytest

from fmengine.config.layout import layout_problems
from fmengine.config.load import load
from fmengine.config.schema import Config
from support.configs import PINNED

BASE = (*PINNED, "batch.global_batch_size=64", "train.precision=bf16")


def config(**parallel: int) -> Config:
    names = {"tp": "tensor_parallel_size", "pp": "pipeline_parallel_size", "sp": "sequence_parallel_size"}
    return load(None, [*BASE, *(f"parallel.{names.get(name, name)}={size}" for name, size in parallel.items())])


def mistakes(config: Config, world_size: int = 8) -> list[tuple[str, str]]:
    return [(".".join(map(str, found.key)), found.text) for found in layout_problems(config, world_size)]


@pytest.mark.parametrize(
    "parallel",
    [
        *({"zero_stage": stage, **axis} for stage in (1, 2, 3) for axis in ({}, {"sp": 2}, {"tp": 2})),
        {"zero_stage": 1, "pp": 2},
        {"zero_stage": 1, "pp": 4},
    ],
)
def test_allowed_layouts(parallel: dict[str, int]) -> None:
    assert mistakes(config(**parallel)) == []


@pytest.mark.parametrize("axis", [{}, {"sp": 2}, {"tp": 2}, {"pp": 2}])
def test_stage_0_runs_in_fp32_alone(axis: dict[str, int]) -> None:
    found = config(zero_stage=0, **axis)
    assert mistakes(found)[0][0] == "parallel.zero_stage"
    assert "set 1, or train.precision fp32" in mistakes(found)[0][1]
    fp32 = found.model_copy(update={"train": found.train.model_copy(update={"precision": "fp32"})})
    assert mistakes(fp32) == []


@pytest.mark.parametrize(
    ("parallel", "key", "words"),
    [
        ({"sp": 2, "tp": 2}, "parallel.sequence_parallel_size", "not together with tensor_parallel_size"),
        ({"sp": 2, "pp": 2}, "parallel.sequence_parallel_size", "not together with pipeline_parallel_size"),
        ({"pp": 2, "tp": 2}, "parallel.pipeline_parallel_size", "in this version"),
        ({"pp": 2, "zero_stage": 2}, "parallel.zero_stage", "set 0 or 1"),
        ({"pp": 2, "zero_stage": 3}, "parallel.zero_stage", "set 0 or 1"),
        ({"pp": 8}, "parallel.pipeline_parallel_size", "8 stages for 4 layers"),
    ],
)
def test_refused_layouts_say_why(parallel: dict[str, int], key: str, words: str) -> None:
    ((found_key, text),) = mistakes(config(**parallel))
    assert found_key == key
    assert words in text


@pytest.mark.parametrize(
    ("sets", "keys"),
    [
        (["model.num_attention_heads=2"], {"model.num_attention_heads"}),
        (["model.num_key_value_heads=2"], {"model.num_key_value_heads"}),
        (["model.intermediate_size=510"], {"model.intermediate_size"}),
        (["model.vocab_size=4094"], set()),
        (["model.family=neox", "model.num_attention_heads=2"], {"model.num_attention_heads"}),
    ],
)
def test_what_a_tensor_size_must_divide(sets: list[str], keys: set[str]) -> None:
    found = load(None, [*BASE, "parallel.tensor_parallel_size=4", *sets])
    assert {key for key, _ in mistakes(found)} == keys


@pytest.mark.parametrize(
    ("sets", "keys"),
    [
        (["model.num_attention_heads=2"], {"model.num_attention_heads"}),
        (["data.sequence_length=254"], {"data.sequence_length"}),
        (["model.num_key_value_heads=2"], set()),  # repeated for the ranks
        (["model.num_attention_heads=12", "model.head_dim=32", "model.num_key_value_heads=6"],
         {"model.num_key_value_heads"}),
    ],
)  # fmt: skip
def test_what_a_sequence_size_must_divide(sets: list[str], keys: set[str]) -> None:
    found = load(None, [*BASE, "parallel.sequence_parallel_size=4", *sets])
    assert {key for key, _ in mistakes(found)} == keys


def test_the_world_is_a_multiple_of_the_model_parallel_size() -> None:
    assert mistakes(config(tp=4), 6) == [
        (
            "parallel",
            "tensor 4 x pipeline 1 x sequence 1 = 4 does not divide the world size 6; "
            "change the number of GPUs (of validate: --world-size) or these sizes",
        )
    ]


def test_the_batch_is_solved_for_the_replicas_that_are_left() -> None:
    assert mistakes(config(tp=2), 12)[0][0] == "batch.global_batch_size"
    assert "6 data-parallel" in mistakes(config(tp=2), 12)[0][1]
    assert mistakes(config(tp=2), 16) == []
