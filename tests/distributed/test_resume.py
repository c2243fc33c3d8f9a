"""A run that is killed and goes on is the undisturbed run: bit for bit at its layout, to rounding at another."""

from types import SimpleNamespace

import pytest
import torch

from fmengine.checkpoint.store import convert
from fmengine.engine.restore import restore_parameters
from support.distributed import WorkerPool
from support.resuming import (
    HALF,
    checkpoint_of,
    make_data,
    second_half,
    second_half_from_store,
    straight_and_first_half,
)
from support.training import Case

ACCUMULATE = {"micro_batch_size": 2}  # 8 rows over two ranks: accumulation 2
SAME = [
    *(Case({"zero_stage": stage}, precision="bf16", **ACCUMULATE) for stage in (1, 2, 3)),
    Case({"zero_stage": 0}, **ACCUMULATE),
    Case({"zero_stage": 1, "pipeline_parallel_size": 2}, precision="bf16", **ACCUMULATE),
]
# an odd width, so that two ranks do not divide the norms evenly
ODD = {"hidden_size": 33, "head_dim": 8}


def test_killed_and_resumed_is_bit_identical(tmp_path):
    """bf16 with fp32 accumulation, accumulation 2, two ranks, ZeRO 1-3, in the middle of epoch 2; kill -9 between."""
    prefix = make_data(tmp_path)
    with WorkerPool(2) as pool:
        straight = pool.run(straight_and_first_half, SAME, prefix, tmp_path)
        # leaving the block kills the processes with SIGKILL
    with WorkerPool(2) as pool:
        resumed = pool.run(second_half, SAME, prefix, tmp_path)
    for rank in (0, 1):
        for case, (steps, state), (again, state_again) in zip(SAME, straight[rank], resumed[rank], strict=True):
            assert again == steps[HALF:], case
            assert state.keys() == state_again.keys()
            for name, values in state.items():
                for kind, value in values.items():
                    assert torch.equal(value, state_again[name][kind]), (case, name, kind)


CROSSINGS = [
    (Case({"zero_stage": 1}, options=ODD, **ACCUMULATE), Case({"zero_stage": 3}, options=ODD, **ACCUMULATE)),
    (Case({"zero_stage": 1}, **ACCUMULATE), Case({"zero_stage": 3}, **ACCUMULATE)),
    (Case({"zero_stage": 3}, **ACCUMULATE), Case({"zero_stage": 2}, **ACCUMULATE)),
    (Case({"zero_stage": 1, "pipeline_parallel_size": 2}, **ACCUMULATE), Case({"zero_stage": 1}, **ACCUMULATE)),
    (Case({"zero_stage": 2}, **ACCUMULATE), Case({"zero_stage": 1, "pipeline_parallel_size": 2}, **ACCUMULATE)),
    (Case({"zero_stage": 0}, **ACCUMULATE), Case({"zero_stage": 1}, **ACCUMULATE)),
    (
        Case({"zero_stage": 1, "pipeline_parallel_size": 2}, options={"tie_word_embeddings": True}, **ACCUMULATE),
        Case({"zero_stage": 0}, options={"tie_word_embeddings": True}, **ACCUMULATE),
    ),
]


def test_a_checkpoint_crosses_layouts(tmp_path):
    """The run goes on at another layout, and is the straight run to fp32's rounding."""
    prefix = make_data(tmp_path)
    with WorkerPool(2) as pool:
        before = [first for first, _ in CROSSINGS]
        straight = pool.run(straight_and_first_half, before, prefix, tmp_path)[0]
        for number in range(len(CROSSINGS)):
            run = tmp_path / str(number)
            convert(checkpoint_of(run), run / "converted")
        crossed = pool.run(second_half_from_store, [after for _, after in CROSSINGS], prefix, tmp_path)[0]
    for (first, second), (steps, _), again in zip(CROSSINGS, straight, crossed, strict=True):
        for expected, found in zip(steps[HALF:], again, strict=True):
            assert found == pytest.approx(expected, rel=1e-4), (first.parallel, second.parallel)


def test_a_checkpoint_crosses_to_tensor_parallel_and_back(tmp_path):
    """ZeRO-1 to TP 2, and TP 2 to ZeRO-3; AutoTP's groups are process globals, so each side has its own processes."""
    prefix = make_data(tmp_path)
    zero, tensor = Case({"zero_stage": 1}, **ACCUMULATE), Case({"zero_stage": 1, "tensor_parallel_size": 2})
    for first, second in ((zero, tensor), (tensor, Case({"zero_stage": 3}, **ACCUMULATE))):
        run = tmp_path / first.parallel.get("tensor_parallel_size", 1).__str__()
        with WorkerPool(2) as pool:
            ((steps, _),) = pool.run(straight_and_first_half, [first], prefix, run)[0]
        convert(checkpoint_of(run / "0"), run / "0" / "converted")
        with WorkerPool(2) as pool:
            (again,) = pool.run(second_half_from_store, [second], prefix, run)[0]
        for expected, found in zip(steps[HALF:], again, strict=True):
            assert found == pytest.approx(expected, rel=1e-4)


def test_steps_that_the_loss_scaler_threw_away_count_for_the_run_and_not_for_adam():
    """Else the run would go on with samples that it has had, and save under a step that it has been at."""
    parameter = torch.nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.AdamW([parameter])
    engine = SimpleNamespace(
        optimizer=optimizer, gradient_accumulation_steps=lambda: 2, train_batch_size=lambda: 8, global_steps=0
    )
    state = SimpleNamespace(
        step=7, weight=lambda _: torch.ones(3), moments=lambda _: (torch.full((3,), 2.0), torch.full((3,), 4.0))
    )
    restore_parameters(engine, {"norm.weight": parameter}, state, lambda _name, tensor: tensor, 10)
    assert (engine.global_steps, engine.micro_steps, engine.global_samples) == (10, 20, 80)
    kept = optimizer.state[parameter]
    assert (float(kept["step"]), kept["exp_avg"][0], kept["exp_avg_sq"][0], parameter[0]) == (7, 2, 4, 1)
