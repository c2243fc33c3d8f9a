"""A parameter's full fp32 weight and moments, out of an engine and into another: `safe_get_*` and `safe_set_*`."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from support.deepspeed_state import MOMENTS, State, base_optimizer, link_moments, read_state, write_state
from support.distributed import WorkerPool
from support.tiny import tiny_engine, train

LAYOUTS = [(1, "fp32"), (2, "fp32"), (3, "fp32"), (1, "bf16"), (2, "bf16"), (3, "bf16")]
CROSSINGS = [
    *((stage, stage, precision) for stage, precision in LAYOUTS),
    (0, 0, "fp32"),
    (1, 3, "bf16"),
    (3, 1, "bf16"),
    (0, 3, "fp32"),
    (3, 0, "fp32"),
]
Pools = Callable[..., WorkerPool]


def gathered(value: Any) -> list[Any]:
    values: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(values, value)
    return values


def layout_facts() -> dict[tuple[int, str], dict[str, Any]]:
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state, safe_set_full_fp32_param

    facts = {}
    for stage, precision in [(0, "fp32"), *LAYOUTS]:
        engine = tiny_engine(stage, precision)
        parameters = dict(engine.module.named_parameters())
        states_before = len(base_optimizer(engine).state)
        weight_before = safe_get_full_fp32_param(parameters["second.weight"]) is not None
        train(engine, range(2))
        linked = gathered(linked_moments(parameters))
        link_moments(engine)
        relinked = gathered(linked_moments(parameters))
        parameter = parameters["second.weight"]
        before = forward_copy(parameter)
        safe_set_full_fp32_param(parameter, torch.full((6, 7), 3.0))
        facts[stage, precision] = {
            "optimizer": type(engine.optimizer).__name__,
            "states before": states_before,
            "weight before": weight_before,
            "linked": linked,
            "relinked": relinked,
            "weight": safe_get_full_fp32_param(parameter),
            "moment": safe_get_full_optimizer_state(parameter, "exp_avg"),
            "low precision unchanged": torch.equal(before, forward_copy(parameter)),
            "steps": [values["step"] for values in base_optimizer(engine).state.values()],
        }
    return facts


def forward_copy(parameter: Any) -> torch.Tensor:
    """What the forward uses, whole."""
    import deepspeed

    with deepspeed.zero.GatheredParameters([parameter] if hasattr(parameter, "ds_id") else []):
        whole: torch.Tensor = parameter.detach().clone()
    assert whole.shape == (6, 7)
    return whole


def linked_moments(parameters: dict[str, Any]) -> dict[str, list[str]]:
    """For ZeRO-1/2: which moments each parameter with a piece on this rank can find."""
    mappings = {name: getattr(parameter, "_hp_mapping", None) for name, parameter in parameters.items()}
    return {name: sorted(mapping.optim_fragment or {}) for name, mapping in mappings.items() if mapping is not None}


@pytest.fixture(scope="module")
def facts(workers: Pools) -> dict[tuple[int, str], dict[str, Any]]:
    result: dict[tuple[int, str], dict[str, Any]] = workers(2).run(layout_facts)[0]
    return result


def test_which_optimizer_wraps_ours(facts: Any) -> None:
    """ZeRO-1 in bf16 with fp32 accumulation is another class than ZeRO-1 in fp32 and ZeRO-2."""
    names = {layout: values["optimizer"] for layout, values in facts.items()}
    assert names == {
        (0, "fp32"): "AdamW",
        (1, "fp32"): "DeepSpeedZeroOptimizer",
        (2, "fp32"): "DeepSpeedZeroOptimizer",
        (3, "fp32"): "DeepSpeedZeroOptimizer_Stage3",
        (1, "bf16"): "BF16_Optimizer",
        (2, "bf16"): "DeepSpeedZeroOptimizer",
        (3, "bf16"): "DeepSpeedZeroOptimizer_Stage3",
    }


def test_moments_do_not_exist_before_the_first_step(facts: Any) -> None:
    """The fp32 weight can be read at once (but at ZeRO-0); torch's AdamW makes its state in the first step."""
    for (stage, _), values in facts.items():
        assert values["states before"] == 0
        assert values["weight before"] == (stage > 0)


def test_zero12_links_the_moments_of_the_first_parameter_group_alone(facts: Any) -> None:
    """DeepSpeedZeroOptimizer links after stepping group 0, when group 1 has no state yet, and never again:
    `safe_get_full_optimizer_state` raises on the ranks that own a piece of a later group's parameter (and the others
    wait in a collective). Linking again helps. BF16_Optimizer links all.
    """
    for (stage, precision), values in facts.items():
        if stage not in (1, 2):
            continue
        for linked, relinked in zip(values["linked"], values["relinked"], strict=True):
            assert all(keys == list(MOMENTS) for keys in relinked.values())
            for name, keys in linked.items():
                first_group = name in ("first.weight", "second.weight")
                complete = first_group or (stage, precision) == (1, "bf16")
                assert keys == (list(MOMENTS) if complete else []), (stage, precision, name)


def test_the_fragment_api_gives_nothing_at_zero0(facts: Any) -> None:
    """In fp32 at ZeRO-0 the getters return None: read the parameter and the torch optimizer's state."""
    assert facts[0, "fp32"]["weight"] is None
    assert facts[0, "fp32"]["moment"] is None


def test_setting_the_fp32_weight_leaves_the_forward_s_copy_as_it_was(facts: Any) -> None:
    """At every stage, ZeRO-3 included and fp32 too: until the next step the forward uses the old weight."""
    for (stage, _), values in facts.items():
        assert values["low precision unchanged"]
        if stage:
            torch.testing.assert_close(values["weight"], torch.full((6, 7), 3.0))


def test_the_step_is_a_float32_scalar_on_the_cpu(facts: Any) -> None:
    """One a flat partition (a parameter at ZeRO-0), torch's own; every one holds the number of steps taken."""
    for (stage, _), values in facts.items():
        assert len(values["steps"]) == (5 if stage == 0 else 2)
        for step in values["steps"]:
            assert (step.dtype, step.shape, step.device.type, float(step)) == (torch.float32, (), "cpu", 2.0)


def zero3_full_setter() -> list[str | None]:
    from deepspeed.utils import safe_set_full_fp32_param

    engine = tiny_engine(3)
    try:
        safe_set_full_fp32_param(engine.module.first.bias, torch.zeros(7))
    except RuntimeError as error:
        return gathered(str(error))
    return gathered(None)


def test_zero3_s_full_setter_fails_where_the_world_size_does_not_divide(workers: Pools) -> None:
    """Seven elements on two ranks are partitions of four: rank 1 asks for elements 4 to 8. `safe_set_local_*` with a
    padded slice works (see support.deepspeed_state).
    """
    first, second = workers(2).run(zero3_full_setter)[0]
    assert first is None
    assert "exceeds dimension size" in second


def crossing(source_stage: int, target_stage: int, precision: str) -> tuple[State, State]:
    source = tiny_engine(source_stage, precision)
    train(source, range(3))
    state = read_state(source)
    train(source, range(3, 5))
    target = tiny_engine(target_stage, precision, seed=1)
    write_state(target, state, step=3)
    train(target, range(3, 5))
    return read_state(source), read_state(target)


@pytest.mark.parametrize(("source", "target", "precision"), CROSSINGS)
def test_full_state_carries_training_from_one_stage_to_another(
    workers: Pools, source: int, target: int, precision: str
) -> None:
    """Weights, moments and step put into a fresh engine as `write_state` does it: it goes on bit for bit."""
    wanted, got = workers(2).run(crossing, source, target, precision)[0]
    for name, values in wanted.items():
        for key, value in values.items():
            assert torch.equal(got[name][key], value), (name, key)
