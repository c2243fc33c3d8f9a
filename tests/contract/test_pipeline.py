"""DeepSpeed's pipeline: stages, loss scale, norms, state, and what it does not go with."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from support.deepspeed_state import base_optimizer, read_state, write_state
from support.distributed import WorkerPool
from support.tiny import adamw, micro_batch, tiny_engine
from support.tiny_pipeline import pipeline, plain_layers, summed_error

Pools = Callable[..., WorkerPool]


@pytest.fixture(scope="module")
def pipeline_workers(workers: Pools) -> WorkerPool:
    """Processes of their own: a pipeline leaves its mpu in a global of DeepSpeed's, see the last test."""
    return workers(2, "pipeline")


def raised(build: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    try:
        build(*args, **kwargs)
    except (AssertionError, NotImplementedError) as error:
        return f"{type(error).__name__}: {error}"
    return "built"


def refusals() -> dict[str, str]:
    return {
        "zero 2": raised(pipeline, 2),
        "zero 3": raised(pipeline, 3),
        "bf16 zero 0": raised(pipeline, 0, "bf16"),
        "profile": raised(pipeline, 0, method="profile"),
    }


def test_what_a_pipeline_refuses(pipeline_workers: WorkerPool) -> None:
    """ZeRO-2 and 3; bf16 with fp32 accumulation without ZeRO-1; the partition method "profile" does not exist."""
    answers = pipeline_workers.run(refusals)[0]
    assert "incompatible with pipeline" in answers["zero 2"]
    assert "incompatible with pipeline" in answers["zero 3"]
    assert "unsupported mix" in answers["bf16 zero 0"]
    assert answers["profile"].startswith("NotImplementedError")


def trained(stage: int, precision: str, accumulation: int, clipping: float) -> dict[str, Any]:
    engine = pipeline(stage, precision, accumulation=accumulation, clipping=clipping)
    norms, losses = [], []
    for step in range(2):
        batches = iter([micro_batch(step, micro) for micro in range(accumulation)])
        losses.append(float(engine.train_batch(batches).detach()))
        norms.append(engine.get_global_grad_norm())
    groups = engine.optimizer.param_groups is base_optimizer(engine).param_groups
    return {"losses": losses, "norms": norms, "state": read_state(engine), "same groups": groups}


def plain(accumulation: int, clipping: float) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """The same in one process, the loss divided by the accumulation steps; second moments by name."""
    model = plain_layers()
    optimizer = adamw(model)
    losses, norms = [], []
    for step in range(2):
        optimizer.zero_grad()
        parts = [micro_batch(step, micro) for micro in range(accumulation)]
        loss = torch.stack([summed_error(model(inputs), targets) for inputs, targets in parts]).mean()
        torch.autograd.backward(loss)
        losses.append(float(loss.detach()))
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), clipping or 1e30)))
        optimizer.step()
    moments = {name: optimizer.state[parameter]["exp_avg"] for name, parameter in model.named_parameters()}
    return losses, norms, moments


def moments_of(results: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
    return {name: values["exp_avg"] for result in results for name, values in result["state"].items()}


@pytest.mark.parametrize(("stage", "precision", "clipping"), [(0, "fp32", 0.0), (1, "fp32", 1.0), (1, "bf16", 1.0)])
def test_the_last_stage_divides_the_loss_by_the_accumulation_steps(
    pipeline_workers: WorkerPool, stage: int, precision: str, clipping: float
) -> None:
    """Always: the reported loss and the gradient are means over micro-batches. At ZeRO-1 clipping and the reported
    norm (before clipping) are over all stages; ZeRO-0 reports none. The names that `module.named_parameters()` gives
    begin with the layer's global index.
    """
    results = pipeline_workers.run(trained, stage, precision, 2, clipping)
    losses, norms, moments = plain(2, clipping)
    got = moments_of(results)
    assert set(got) == set(moments)
    relative, absolute = (1e-4, 1e-6) if precision == "fp32" else (0.1, 3e-3)
    for name, moment in moments.items():
        torch.testing.assert_close(got[name], moment, rtol=relative, atol=absolute)
    for result in results:
        assert result["losses"] == pytest.approx(losses, rel=relative)
        assert result["same groups"]
        if stage == 0:
            assert result["norms"] == [None, None]
        else:
            assert [float(norm) for norm in result["norms"]] == pytest.approx(norms, rel=relative)


def first_step(clipping: float) -> dict[str, Tensor]:
    engine = pipeline(0, clipping=clipping)
    engine.train_batch(iter([micro_batch(0)]))
    return {name: values["exp_avg"] / 0.1 for name, values in read_state(engine).items()}


def test_zero0_clips_a_pipeline_by_the_first_stage_s_norm(pipeline_workers: WorkerPool) -> None:
    """In fp32 without ZeRO, `clip_grad_norm_` counts the parameters of the grid's model-parallel rank 0 alone, which
    is the first stage: the clipped gradient is too long. ZeRO-1 counts all.
    """
    whole, clipped = ([*pipeline_workers.run(first_step, clipping)] for clipping in (0.0, 1.0))
    first_stage = torch.stack([gradient.norm() for gradient in whole[0].values()]).norm()
    for before, after in zip(whole, clipped, strict=True):
        for name, gradient in before.items():
            torch.testing.assert_close(after[name], gradient / first_stage, rtol=1e-4, atol=1e-6)


def crossing(stage: int, precision: str) -> bool:
    source = pipeline(stage, precision)
    for step in range(2):
        source.train_batch(iter([micro_batch(step)]))
    state = read_state(source)
    source.train_batch(iter([micro_batch(2)]))
    target = pipeline(stage, precision, seed=1)
    write_state(target, state, step=2)
    target.train_batch(iter([micro_batch(2)]))
    wanted, got = read_state(source), read_state(target)
    return all(torch.equal(got[name][key], value) for name in wanted for key, value in wanted[name].items())


@pytest.mark.parametrize(("stage", "precision"), [(0, "fp32"), (1, "fp32"), (1, "bf16")])
def test_full_state_goes_in_and_out_of_a_pipeline(pipeline_workers: WorkerPool, stage: int, precision: str) -> None:
    """The recipe of support.deepspeed_state holds there too, each stage for its own layers, bit for bit."""
    assert pipeline_workers.run(crossing, stage, precision) == [True, True]


def autotp_replaces_the_mpu() -> dict[str, Any]:
    from deepspeed.utils import groups

    section = {"autotp_size": 2, "partition_config": {"use_default_specs": False, "layer_specs": []}}
    engine = pipeline(1, extra={"tensor_parallel": section})
    group = groups.get_tensor_model_parallel_group()
    return {
        "grid kept": engine.mpu is engine.grid or engine.mpu is engine.module.mpu(),
        "replaced by groups": engine.mpu is groups,
        "tensor ranks": sorted(torch.distributed.get_process_group_ranks(group)),
        "stage": engine.stage_id,
    }


def test_an_autotp_section_breaks_a_pipeline(workers: Pools) -> None:
    """It replaces the pipeline's mpu: both stages land in one tensor group, whose ranks then wait for each other's
    input check while one of them waits for activations. Its groups are process globals, hence processes of their own.
    """
    for result in workers(2, "tensor-parallel").run(autotp_replaces_the_mpu):
        assert not result["grid kept"]
        assert result["replaced by groups"]
        assert result["tensor ranks"] == [0, 1]


def stage_bounds(method: str) -> Sequence[int]:
    return [int(bound) for bound in pipeline(0, method=method).module.parts]


def test_uniform_stages_put_the_larger_part_first(pipeline_workers: WorkerPool) -> None:
    """Three layers on two stages: two and one; `parts` are bounds in global layer numbers."""
    assert pipeline_workers.run(stage_bounds, "uniform") == [[0, 2, 3]] * 2


def engine_after_pipeline() -> str:
    pipeline(0)
    try:
        tiny_engine(1)
    except AttributeError as error:
        return str(error)
    return "built"


def test_a_process_that_built_a_pipeline_builds_no_other_engine(pipeline_workers: WorkerPool) -> None:
    """`deepspeed.utils.groups` remembers the pipeline's mpu: an engine without one then asks None for its rank."""
    assert "get_model_parallel_rank" in pipeline_workers.run(engine_after_pipeline)[0]
