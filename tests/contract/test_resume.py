"""Resume at the same layout is DeepSpeed's own; from one ZeRO stage to another it is not."""

from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from support.deepspeed_state import read_state
from support.distributed import WorkerPool
from support.tiny import tiny_engine, train

LAYOUTS = [(0, "fp32"), (1, "fp32"), (2, "fp32"), (3, "fp32"), (1, "bf16"), (2, "bf16"), (3, "bf16")]
ACCUMULATION = 2
Pools = Callable[..., WorkerPool]


def resumed(folder: str, stage: int, precision: str) -> dict[str, Any]:
    keys: dict[str, Any] = {"accumulation": ACCUMULATION, "clipping": 1.0}
    straight = tiny_engine(stage, precision, **keys)
    train(straight, range(3), ACCUMULATION)
    for group in straight.optimizer.param_groups:
        group["lr"] = 5e-3
    straight.save_checkpoint(folder, tag="state", save_latest=False)
    train(straight, range(3, 5), ACCUMULATION)
    again = tiny_engine(stage, precision, seed=1, **keys)
    path, _ = again.load_checkpoint(folder, tag="state", load_lr_scheduler_states=False)
    rates = [group["lr"] for group in again.optimizer.param_groups]
    counters = (again.global_steps, again.micro_steps)
    train(again, range(3, 5), ACCUMULATION)
    wanted, got = read_state(straight), read_state(again)
    equal = all(torch.equal(got[name][key], value) for name in wanted for key, value in wanted[name].items())
    return {"found": path is not None, "rates": rates, "counters": counters, "equal": equal}


@pytest.mark.parametrize(("stage", "precision"), LAYOUTS)
def test_resume_at_the_same_layout_is_bit_identical(workers: Pools, tmp_path: Path, stage: int, precision: str) -> None:
    """Two ranks, accumulation 2, clipping, two parameter groups, bf16 with fp32 accumulation. The learning rate comes
    back with the groups; `global_steps` does, `micro_steps` starts at 0.
    """
    for result in workers(2).run(resumed, str(tmp_path), stage, precision):
        assert result == {"found": True, "rates": [5e-3] * 2, "counters": (3, 0), "equal": True}


def load_nothing(folder: str) -> list[str]:
    engine, answers = tiny_engine(1), []
    for tag in (None, "state"):
        try:
            answers.append(str(engine.load_checkpoint(folder, tag=tag)[0]))
        except AssertionError:
            answers.append("AssertionError")
    return answers


def test_loading_from_an_empty_folder(workers: Pools, tmp_path: Path) -> None:
    """With no tag and no `latest` file it warns and returns None for the path; with a tag it asserts, wordlessly."""
    assert workers(2).run(load_nothing, str(tmp_path)) == [["None", "AssertionError"]] * 2


def universal(folder: str, stage: int) -> dict[int, str]:
    """Save at one stage, convert to Universal Checkpoint, load at stages 1 and 3."""
    from deepspeed.checkpoint import ds_to_universal

    engine = tiny_engine(stage)
    train(engine, range(2))
    engine.save_checkpoint(folder, tag="state", client_state={"universal_checkpoint_info": {}})
    torch.distributed.barrier()
    if torch.distributed.get_rank() == 0:
        options = {"num_extract_workers": 1, "num_merge_workers": 1, "keep_temp_folder": False, "strict": True}
        paths = {"input_folder": f"{folder}/state", "output_folder": f"{folder}/universal"}
        ds_to_universal.main(Namespace(**paths, **options, inject_missing_state=False))
        Path(folder, "latest_universal").write_text("universal")
    torch.distributed.barrier()
    answers = {}
    for target in (1, 3):
        other = tiny_engine(target, seed=1, extra={"checkpoint": {"load_universal": True}})
        try:
            other.load_checkpoint(folder, tag="universal")
            answers[target] = "loaded"
        except (AssertionError, KeyError, FileNotFoundError, RuntimeError) as error:
            answers[target] = type(error).__name__
    return answers


@pytest.mark.parametrize("stage", [1, 3])
def test_universal_checkpoint_does_not_cross_zero3_s_border(workers: Pools, tmp_path: Path, stage: int) -> None:
    """ZeRO-1 loads at ZeRO-1 and ZeRO-3 at ZeRO-3, neither at the other: why our store of full state exists. Should
    this fail because it loads, look at what DeepSpeed has learned.
    """
    for answers in workers(2).run(universal, str(tmp_path), stage):
        assert answers[stage] == "loaded"
        assert answers[4 - stage] != "loaded"
