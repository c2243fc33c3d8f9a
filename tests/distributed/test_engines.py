"""Every engine equals a plain PyTorch + Transformers loop: same batches, same weights, clipping active."""

from dataclasses import replace
from typing import Any

import pytest

from support.training import ROWS, Case, plain_loop, run_cases

TOLERANCE = 1e-4  # relative, fp32


def assert_equal(results: list[dict[str, Any]], expected: dict[str, Any]) -> None:
    for rank, result in enumerate(results):
        assert len(result["steps"]) == len(expected["steps"])
        for step, (ours, theirs) in enumerate(zip(result["steps"], expected["steps"], strict=True)):
            assert ours == pytest.approx(theirs, rel=TOLERANCE), f"rank {rank} step {step}"
        assert result["eval"] == pytest.approx(expected["eval"], rel=TOLERANCE)


@pytest.mark.parametrize("world_size", [1, 2])
def test_zero_equals_the_plain_loop(workers, world_size):
    """30 steps, ZeRO 0-3, one and two processes, accumulation 1 and 4 at one global batch."""
    expected = plain_loop(Case(steps=30))
    assert all(norm > 0.25 for _, norm, _ in expected["steps"]), "clipping must be active"
    cases = [
        Case({"zero_stage": stage}, micro_batch_size=ROWS // world_size // accumulation, steps=30)
        for stage in (0, 1, 2, 3)
        for accumulation in (1, 4)
    ]
    by_rank = workers(world_size).run(run_cases, cases)
    for number, case in enumerate(cases):
        print(case.parallel, case.micro_batch_size)
        assert_equal([rank[number] for rank in by_rank], expected)


def test_neox_equals_the_plain_loop(workers):
    case = Case({"zero_stage": 2}, micro_batch_size=2, model="neox")
    (results,) = zip(*workers(2).run(run_cases, [case]), strict=True)
    assert_equal(list(results), plain_loop(case))


def test_the_norm_is_known_with_clipping_off(workers):
    """Without it every checkpoint would be refused as that of a run whose gradients are not finite."""
    cases = [Case({"zero_stage": stage}, micro_batch_size=4, clipping=0.0, steps=3) for stage in (0, 1, 3)]
    expected = plain_loop(Case(clipping=1e9, steps=3))
    for rank in workers(2).run(run_cases, cases):
        for result in rank:
            assert_equal([result], expected)


@pytest.mark.parametrize("name", ["pipeline", "tensor", "sequence"])
def test_model_parallel_equals_one_process(workers, name):
    """Two processes with PP, TP or SP of 2 equal one process for 10 steps; both families, tied heads too."""
    stages = {"pipeline": (0, 1), "tensor": (1, 3), "sequence": (0, 1, 2, 3)}[name]
    size = {f"{name}_parallel_size": 2}
    cases = [Case({**size, "zero_stage": stage}, micro_batch_size=4) for stage in stages]
    cases += [Case({**size, "zero_stage": 1}, micro_batch_size=2, model="neox")]
    cases += [Case({**size, "zero_stage": 1}, micro_batch_size=4, options={"tie_word_embeddings": True})]
    by_rank = workers(2, name).run(run_cases, cases)
    for number, case in enumerate(cases):
        print(case)
        assert_equal([rank[number] for rank in by_rank], plain_loop(case))


PLAIN = Case({"zero_stage": 1}, micro_batch_size=4, precision="bf16")


@pytest.mark.parametrize("name", ["pipeline", "tensor", "sequence"])
def test_model_parallel_in_bf16_follows_zero_1(workers, name):
    """bf16 rounds by layout, so the bound is bf16's: 1 % for losses and 5 % for norms, all of 10 steps."""
    expected = workers(2).run(run_cases, [PLAIN])[0][0]["steps"]
    case = Case({f"{name}_parallel_size": 2, "zero_stage": 1}, micro_batch_size=4, precision="bf16")
    for rank in workers(2, name).run(run_cases, [case]):
        for ours, theirs in zip(rank[0]["steps"], expected, strict=True):
            assert ours[0] == pytest.approx(theirs[0], rel=1e-2)
            assert ours[1] == pytest.approx(theirs[1], rel=5e-2)


def test_full_activation_checkpointing_changes_nothing(workers):
    plain = [Case({"zero_stage": stage}, micro_batch_size=4, steps=3) for stage in (1, 3)]
    by_rank = workers(2).run(run_cases, [*plain, *(replace(case, activation_checkpointing="full") for case in plain)])
    for rank in by_rank:
        assert rank[2:] == rank[:2]
