"""What one optimizer step of DeepSpeed does at each ZeRO stage: scales, norms, clipping, learning rate, fp16."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from support.deepspeed_state import State, base_optimizer, read_state
from support.distributed import WorkerPool
from support.tiny import adamw, micro_batch, tiny_engine, tiny_net, train

RATES = [1e-2, 3e-3, 1e-3]
ACCUMULATION = 2
LAYOUTS = [(0, "fp32"), (1, "fp32"), (2, "fp32"), (3, "fp32"), (1, "bf16"), (2, "bf16"), (3, "bf16")]
FP32 = [layout for layout in LAYOUTS if layout[1] == "fp32"]
Pools = Callable[..., WorkerPool]


def rank() -> int:
    return torch.distributed.get_rank()


def three_steps(clipping: float) -> dict[tuple[int, str], dict[str, Any]]:
    results = {}
    for stage, precision in LAYOUTS:
        engine = tiny_engine(stage, precision, accumulation=ACCUMULATION, clipping=clipping, learning_rate=123.0)
        norms, applied = [], []
        for step, rate in enumerate(RATES):
            for group in engine.optimizer.param_groups:
                group["lr"] = rate
            for micro in range(ACCUMULATION):
                loss = engine(*micro_batch(step, micro, rank()))
                engine.backward(loss * 1.0, scale_wrt_gas=False)
                engine.step()
                applied.append(engine.was_step_applied())
            norms.append(engine.get_global_grad_norm())
        results[stage, precision] = {
            "state": read_state(engine),
            "norms": norms,
            "applied": applied,
            "counters": (engine.global_steps, engine.micro_steps, engine.skipped_steps),
            "rates": [group["lr"] for group in engine.optimizer.param_groups],
            "same groups": engine.optimizer.param_groups is base_optimizer(engine).param_groups,
        }
    return results


def plain_steps(clipping: float) -> tuple[State, list[float]]:
    """The same in plain torch, the gradient being the MEAN over two ranks of the sum over micro-batches."""
    model, norms = tiny_net(), []
    optimizer = adamw(model)
    for step, rate in enumerate(RATES):
        optimizer.zero_grad()
        for data_rank in range(2):
            for micro in range(ACCUMULATION):
                (model(*micro_batch(step, micro, data_rank)) / 2).backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), clipping or 1e30)))
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
    state = {
        name: {
            "weight": parameter.detach(),
            **{key: optimizer.state[parameter][key] for key in ("exp_avg", "exp_avg_sq")},
        }
        for name, parameter in model.named_parameters()
    }
    return state, norms


@pytest.fixture(scope="module", params=[0.0, 1.0], ids=["unclipped", "clipped"])
def compared(workers: Pools, request: pytest.FixtureRequest) -> Any:
    return workers(2).run(three_steps, request.param)[0], plain_steps(request.param)


def test_the_step_is_that_of_plain_torch_on_the_mean_over_ranks(compared: Any) -> None:
    """Every ZeRO stage divides by the data-parallel size, ZeRO-3 too; with `scale_wrt_gas=False` and a scaled loss
    nothing divides by the accumulation steps; `gradient_clipping` is torch's clip on the global norm; a learning rate
    set in `engine.optimizer.param_groups` before `step()` is the one used. Weights and moments show all four.
    """
    results, (wanted, _) = compared
    for layout in FP32:
        for name, values in results[layout]["state"].items():
            for key, value in values.items():
                torch.testing.assert_close(value, wanted[name][key], rtol=1e-5, atol=1e-6, msg=f"{layout} {name} {key}")


def test_the_learning_rate_is_in_the_wrapper_s_own_groups(compared: Any) -> None:
    """`engine.optimizer.param_groups` is the very list of the torch optimizer inside, at every stage."""
    for result in compared[0].values():
        assert result["same groups"]
        assert result["rates"] == [RATES[-1]] * 2


def test_the_reported_norm_is_the_global_one_before_clipping(compared: Any) -> None:
    """`get_global_grad_norm()` at ZeRO-1 to 3: a scalar tensor, before clipping, of the mean gradient."""
    results, (_, wanted) = compared
    for (stage, precision), result in results.items():
        if stage == 0:
            continue
        assert all(isinstance(norm, torch.Tensor) for norm in result["norms"])
        assert [float(norm) for norm in result["norms"]] == pytest.approx(
            wanted, rel=1e-5 if precision == "fp32" else 2e-2
        )


def test_zero0_in_fp32_reports_no_norm(compared: Any) -> None:
    """It clips, and forgets the norm."""
    assert compared[0][0, "fp32"]["norms"] == [None] * 3


def test_a_step_is_applied_at_the_accumulation_boundary_alone(compared: Any) -> None:
    """`was_step_applied()` is False between boundaries; micro_steps counts backward passes."""
    for result in compared[0].values():
        assert result["applied"] == [False, True] * 3
        assert result["counters"] == (3, 6, 0)


def first_moment_norms() -> dict[tuple[int, str, str], float]:
    """Norm of the first gradient, from exp_avg = (1 - 0.9) g, for three ways to call backward."""
    norms = {}
    for stage, precision in LAYOUTS:
        for how in ("output", "scaled", "default"):
            engine = tiny_engine(stage, precision, accumulation=ACCUMULATION)
            for micro in range(ACCUMULATION):
                loss = engine(*micro_batch(0, micro, rank()))
                if how == "default":
                    engine.backward(loss)
                else:
                    engine.backward(loss * 1.0 if how == "scaled" else loss, scale_wrt_gas=False)
                engine.step()
            squares = [values["exp_avg"].square().sum() for values in read_state(engine).values()]
            norms[stage, precision, how] = float(torch.stack(squares).sum().sqrt()) / 0.1
    return norms


def test_scale_wrt_gas_false_needs_a_loss_that_is_not_the_engine_s_own_output(workers: Pools) -> None:
    """`backward(loss, scale_wrt_gas=False)` leaves out the division by the accumulation steps. The trap: on the very
    tensor that the engine's forward returned, a hook divides all the same at ZeRO-0 in fp32 and ZeRO-1 in bf16, whose
    optimizers put no loss scale between. A new tensor (`loss * scale`) is safe at every stage.
    """
    norms = workers(2).run(first_moment_norms)[0]
    for stage, precision in LAYOUTS:
        summed = norms[stage, precision, "scaled"]
        assert summed == pytest.approx(2 * norms[stage, precision, "default"], rel=1e-3)
        trapped = (stage, precision) in [(0, "fp32"), (1, "bf16")]
        assert norms[stage, precision, "output"] == pytest.approx(summed / (2 if trapped else 1), rel=1e-3)


def zero0_in_bf16() -> str:
    try:
        tiny_engine(0, "bf16")
    except NotImplementedError as error:
        return str(error)
    return "built"


def test_zero0_in_bf16_with_fp32_accumulation_is_not_implemented(workers: Pools) -> None:
    """So bf16 needs ZeRO-1 at least."""
    assert "unsupported mix" in workers(2).run(zero0_in_bf16)[0]


def with_fp16_allowed() -> Any:
    """DeepSpeed's accelerator, persuaded that this CPU may run fp16 (torch can)."""
    from deepspeed.accelerator import get_accelerator

    accelerator = get_accelerator()
    accelerator.is_fp16_supported = lambda: True
    return accelerator


def fp16_overflow() -> dict[int, list[tuple[Any, ...]]]:
    accelerator = with_fp16_allowed()
    results: dict[int, list[tuple[Any, ...]]] = {}
    for stage in (1, 2, 3):
        engine = tiny_engine(stage, "fp16")
        results[stage] = []
        for scale in (1.0, 1e30, 1.0):
            loss = engine(*micro_batch(0, 0, rank()))
            engine.backward(loss * scale, scale_wrt_gas=False)
            engine.step()
            steps = {float(values["step"]) for values in base_optimizer(engine).state.values()}
            norm = float(engine.get_global_grad_norm())
            results[stage].append(
                (engine.was_step_applied(), engine.skipped_steps, engine.global_steps, norm == float("inf"), steps)
            )
    del accelerator.is_fp16_supported
    return results


def test_an_fp16_overflow_shows_in_was_step_applied(workers: Pools) -> None:
    """A step thrown away: `was_step_applied()` is False, `skipped_steps` grows, the norm is inf, Adam's own step
    count stands still, and yet `global_steps` goes on: it counts attempts.
    """
    for outcomes in workers(2).run(fp16_overflow)[0].values():
        assert outcomes == [
            (True, 0, 1, False, {1.0}),
            (False, 1, 2, True, {1.0}),
            (True, 1, 3, False, {2.0}),
        ]


def fp16_refused() -> str:
    try:
        tiny_engine(1, "fp16")
    except ValueError as error:
        return str(error)
    return "built"


def test_fp16_is_refused_on_a_cpu(workers: Pools) -> None:
    """DeepSpeed's CPU accelerator allows fp32 and bf16."""
    assert "fp16 is not supported" in workers(2).run(fp16_refused)[0]


def zero0_fp16_moments() -> tuple[float, float]:
    accelerator = with_fp16_allowed()
    sizes = []
    for stage in (0, 1):
        engine = tiny_engine(stage, "fp16")
        train(engine, range(1))
        if stage:
            sizes.append(float(read_state(engine)["second.weight"]["exp_avg"].abs().sum()))
        else:
            state = base_optimizer(engine).state
            sizes.append(next(float(v["exp_avg"].abs().sum()) for v in state.values() if v["exp_avg"].shape == (6, 7)))
    del accelerator.is_fp16_supported
    return sizes[0], sizes[1]


def test_zero0_in_fp16_scales_gradients_wrongly(workers: Pools) -> None:
    """FP16_UnfusedOptimizer divides by a loss scale (256 here) that `engine.backward` never multiplied by."""
    zero0, zero1 = workers(2).run(zero0_fp16_moments)[0]
    assert zero0 < zero1 / 100
