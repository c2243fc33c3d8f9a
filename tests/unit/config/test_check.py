from pathlib import Path

import pytest

from fmengine.config.check import check, check_or_raise
from fmengine.config.load import load, load_with_source
from fmengine.errors import UserError
from support.configs import MODEL, PINNED, write_config


@pytest.mark.parametrize(
    ("sets", "words"),
    [
        (["schedule.warmup_steps=121"], "schedule.warmup_steps: 121 warmup_steps + 0 decay_steps = 121 are more than"),
        (
            ["schedule.shape=wsd", "schedule.decay_steps=109"],
            "schedule.warmup_steps: 12 warmup_steps + 109 decay_steps = 121",
        ),
        (["schedule.decay_steps=5"], "schedule.decay_steps: only shape wsd has it, not cosine"),
        (["data.validation_fraction=0"], "train.eval_interval: nothing to validate on"),
        (
            ["model.max_position_embeddings=255"],
            "data.sequence_length: 256 is longer than model.max_position_embeddings 255",
        ),
    ],
)
def test_numbers_of_different_sections_that_do_not_fit(tmp_path: Path, sets: list[str], words: str) -> None:
    (found,) = check(load(None, [f"run.dir={tmp_path}", *PINNED, *sets]), 1)
    assert found.startswith(words)


@pytest.mark.parametrize(
    "sets",
    [
        ["schedule.warmup_steps=120"],
        ["schedule.shape=wsd", "schedule.decay_steps=108"],
        ["data.validation_fraction=0", "train.eval_interval=0"],
    ],
)
def test_numbers_that_just_fit(tmp_path: Path, sets: list[str]) -> None:
    assert check(load(None, [f"run.dir={tmp_path}", *PINNED, *sets]), 1) == []


def test_all_problems_come_together_with_their_lines(tmp_path: Path) -> None:
    text = f"{MODEL}parallel: {{pipeline_parallel_size: 4}}\nbatch:\n  global_batch_size: 3\ndata:\n  train: none\n"
    config, source = load_with_source(
        write_config(tmp_path, text), ["schedule.warmup_steps=9999", f"run.dir={tmp_path}"]
    )
    with pytest.raises(UserError) as caught:
        check_or_raise(config, 8, source)
    starts = [problem.removeprefix(f"{tmp_path}/").rsplit(": ", 1)[0] for problem in caught.value.problems]
    assert starts[0] == "train.yaml:7: parallel.pipeline_parallel_size"
    assert starts[1].startswith("train.yaml:9: batch.global_batch_size: 3 is not divisible by 2 data-parallel")
    assert starts[2].startswith("train.yaml:11: data.train: none.idx")
    assert starts[3] == "--set schedule.warmup_steps=9999: schedule.warmup_steps"
    assert len(starts) == 4


def test_the_deepspeed_section_of_a_config_made_in_code_is_checked_too(tmp_path: Path) -> None:
    config = load(None, [f"run.dir={tmp_path}"]).model_copy(update={"deepspeed": {"train_batch_size": 1}})
    assert check(config, 1) == [
        "deepspeed.train_batch_size: FMEngine sets this itself; set batch.global_batch_size instead"
    ]
