from pathlib import Path

import pytest

from fmengine.config.load import load, load_with_source
from fmengine.errors import UserError
from support.configs import MODEL, write_config


def mistakes(path: Path | None, *sets: str) -> list[str]:
    with pytest.raises(UserError) as caught:
        load(path, sets)
    return [problem.rsplit("/", 1)[-1] for problem in caught.value.problems]


def test_mistakes_of_every_kind_are_reported_at_once_with_their_lines(tmp_path: Path) -> None:
    text = """\
version: 1
model:
  family: llama
  hidden_size: "64"
  num_hidden_layers: 2
  num_attention_heads: 4
  layer_norm_eps: 1e-5
optimizer:
  lrr: 1e-4
  betas: [0.9, 1.5]
train:
  steps: 10
  precision: int8
  steps: 20
deepspeed:
  zero_optimization:
    stage: 2
optim: 3
"""
    assert mistakes(write_config(tmp_path, text)) == [
        'train.yaml:4: model.hidden_size: must be a whole number, not the text "64"',
        "train.yaml:7: model.layer_norm_eps: family llama has no such option (family neox has); leave it out",
        "train.yaml:9: optimizer.lrr: no such key; did you mean learning_rate?",
        "train.yaml:10: optimizer.betas.1: must be below 1.0, not 1.5",
        "train.yaml:13: train.precision: must be 'bf16', 'fp16' or 'fp32', not the text \"int8\"",
        "train.yaml:14: train.steps: given twice, first in line 12; keep one",
        "train.yaml:17: deepspeed.zero_optimization.stage: FMEngine sets this itself; set parallel.zero_stage instead",
        "train.yaml:18: optim: no such key; did you mean optimizer?",
    ]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("train: {steps: true}", "must be a whole number, not true"),
        ("train: {steps: 2.5}", "must be a whole number, not 2.5"),
        ("train: {steps: 0}", "must be above 0, not 0"),
        ("train: {steps: }", "must be a whole number, not empty"),
        ("optimizer: {eps: .nan}", "must be a finite number"),
        ("optimizer: {eps: 1e999}", "must be a finite number"),
        ("optimizer: {learning_rate: fast}", 'must be a number, not the text "fast"'),
        ("optimizer: {betas: [0.9]}", "has too few values"),
        ("optimizer: {betas: [0.9, 0.9, 0.9]}", "must be a list of 2"),
        ("optimizer: {betas: 0.9}", "must be a list"),
        ("optimizer: 3", "must be a section"),
        ("deepspeed: [1]", "must be a section"),
        ("data: {mask_documents: no}", 'must be true or false, not the text "no"'),
        ("run: {dir: 3}", "must be text, not 3"),
        ("data: {validation_fraction: 0.5}", "must be below 0.5, not 0.5"),
        ("checkpoint: {keep: 0}", "must be 1 or more, not 0"),
    ],
)
def test_wrong_values_are_told_in_plain_words(tmp_path: Path, line: str, words: str) -> None:
    (found,) = mistakes(write_config(tmp_path, f"{MODEL}{line}\n"))
    assert found.startswith("train.yaml:7: ")
    assert words in found


@pytest.mark.parametrize("value", ["2", "1.5", "'1'", "true", "null"])
def test_another_version_is_refused_in_one_line(tmp_path: Path, value: str) -> None:
    (found,) = mistakes(write_config(tmp_path, f"nonsense: 1\nversion: {value}\n"))
    assert found.startswith("train.yaml:2: version: this program reads version 1, not ")


def test_files_that_hold_no_config(tmp_path: Path) -> None:
    assert "no such file" in mistakes(tmp_path / "missing.yaml")[0]
    assert "llama-3-8b" in mistakes(Path("llama-3-9b"))[0]
    for empty in ("", "# nothing\n", "---\n"):
        assert "holds no config" in mistakes(write_config(tmp_path, empty))[0]
    (found,) = mistakes(write_config(tmp_path, "\n- model\n"))
    assert found.startswith("train.yaml:2: must be sections")


def test_a_section_whose_keys_are_all_commented_out_is_empty(tmp_path: Path) -> None:
    config = load(write_config(tmp_path, f"{MODEL}train:\n  # steps: 3\ndeepspeed:\n"))
    assert config.train.steps == 1000
    assert config.deepspeed == {}


def test_an_architecture_needs_its_four_numbers(tmp_path: Path) -> None:
    found = mistakes(write_config(tmp_path, "train:\n  steps: 3\nmodel:\n  hidden_size: 64\n"))
    assert [problem.split(": ")[1] for problem in found] == [
        "model.family",
        "model.num_hidden_layers",
        "model.num_attention_heads",
    ]
    assert all(problem.startswith("train.yaml:3: ") for problem in found)


def test_a_misspelt_needed_key_is_one_mistake(tmp_path: Path) -> None:
    (found,) = mistakes(write_config(tmp_path, MODEL.replace("family", "famly")))
    assert found == "train.yaml:2: model.famly: no such key; did you mean family?"


def test_set_lays_values_over_the_file(tmp_path: Path) -> None:
    file = write_config(tmp_path, f"{MODEL}train:\n  steps: 10\n")
    sets = (
        "train.steps=20",
        "train.steps=30",
        "optimizer.betas=[0.8, 0.9]",
        "deepspeed.zero_optimization.reduce_bucket_size=5e5",
        "run.dir=1e-4 runs",
        "schedule={warmup_steps: 3}",
    )
    config = load(file, sets)
    assert config.train.steps == 30
    assert config.optimizer.betas == (0.8, 0.9)
    assert config.deepspeed == {"zero_optimization": {"reduce_bucket_size": 5e5}}
    assert config.run.dir == Path("1e-4 runs")
    assert config.schedule.warmup_steps == 3
    assert load(file, ["data.tokenizer=null"]).data.tokenizer is None


def test_mistakes_in_set_are_told_beside_those_of_the_file(tmp_path: Path) -> None:
    file = write_config(tmp_path, f"{MODEL}train:\n  stepps: 10\n")
    assert mistakes(file, "optimizer.lr=3", "train.steps=no", "train.steps.x=1") == [
        "train.yaml:8: train.stepps: no such key; did you mean steps?",
        "--set optimizer.lr=3: optimizer.lr: no such key; did you mean learning_rate?",
        '--set train.steps=no: train.steps: must be a whole number, not the text "no"',
        "--set train.steps.x=1: train.steps.x: train.steps is a value, not a section",
    ]


@pytest.mark.parametrize("argument", ["train.steps", "=3", "train..steps=3", ".=1"])
def test_set_without_key_or_value(argument: str) -> None:
    with pytest.raises(UserError, match="must be KEY=VALUE"):
        load(None, [argument])


def test_set_with_a_value_that_is_not_yaml() -> None:
    with pytest.raises(UserError, match=r"^--set optimizer\.betas=\[1: not YAML"):
        load(None, ["optimizer.betas=[1"])


def test_a_value_put_over_the_file_is_blamed_on_set(tmp_path: Path) -> None:
    file = write_config(tmp_path, f"{MODEL}optimizer:\n  eps: 1\n")
    assert mistakes(file, "optimizer={eps: -1}") == [
        "--set optimizer={eps: -1}: optimizer.eps: must be above 0.0, not -1"
    ]


def test_the_source_knows_where_a_key_was_given(tmp_path: Path) -> None:
    _, source = load_with_source(write_config(tmp_path, MODEL), ["train.steps=3"])
    assert source.lines[("model", "hidden_size")] == 4
    assert source.sets == {("train", "steps"): "train.steps=3"}


def test_no_path_is_the_default_recipe_for_either_family() -> None:
    assert load(None).model.family == "llama"
    neox = load(None, ["model.family=neox"]).model
    assert neox.family == "neox"
    assert neox.rotary_pct == 0.25
    assert neox.rms_norm_eps is None
