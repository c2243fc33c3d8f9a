"""The learning rate as a function of the step: known values, and what must hold for every schedule."""

import math
from itertools import pairwise

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from fmengine.config.schema import ScheduleConfig
from fmengine.schedule import learning_rate

PEAK = 3e-4
SHAPES = ["cosine", "linear", "wsd", "constant"]


def rates(steps: int, **schedule: object) -> list[float]:
    config = ScheduleConfig.model_validate(schedule)
    return [learning_rate(step, steps=steps, peak=PEAK, schedule=config) for step in range(steps)]


@st.composite
def runs(draw: st.DrawFn) -> tuple[int, ScheduleConfig]:
    steps = draw(st.integers(1, 200))
    return steps, ScheduleConfig(
        shape=draw(st.sampled_from(SHAPES)),
        warmup_steps=draw(st.integers(0, 250)),
        decay_steps=draw(st.none() | st.integers(1, 250)),
        min_ratio=draw(st.floats(0, 1)),
    )


def test_warm_up_is_linear_and_its_first_update_is_not_wasted() -> None:
    assert rates(10, warmup_steps=4)[:4] == pytest.approx([PEAK / 4, PEAK / 2, 3 * PEAK / 4, PEAK])


def test_linear() -> None:
    assert rates(5, shape="linear", min_ratio=0.2) == pytest.approx([PEAK * r for r in (1, 0.8, 0.6, 0.4, 0.2)])


def test_cosine_is_half_way_in_the_middle() -> None:
    values = rates(101, shape="cosine", min_ratio=0.1)
    assert values[50] == pytest.approx(0.55 * PEAK)
    assert values[25] == pytest.approx(PEAK * (0.1 + 0.9 * (1 + math.cos(math.pi / 4)) / 2))


def test_wsd_is_constant_and_then_linear_over_the_last_tenth() -> None:
    values = rates(100, shape="wsd", warmup_steps=10, min_ratio=0)
    assert values[9:90] == [PEAK] * 81
    assert values[89:] == pytest.approx([PEAK * (1 - i / 10) for i in range(11)], abs=1e-18)


def test_wsd_decays_over_decay_steps() -> None:
    values = rates(20, shape="wsd", decay_steps=4, min_ratio=0)
    assert values[15:] == pytest.approx([PEAK, 0.75 * PEAK, 0.5 * PEAK, 0.25 * PEAK, 0], abs=1e-18)


def test_constant_stays_at_the_peak() -> None:
    assert rates(9, shape="constant", warmup_steps=2) == [PEAK / 2] + [PEAK] * 8


@pytest.mark.parametrize("shape", SHAPES)
def test_a_warm_up_longer_than_the_run_never_ends(shape: str) -> None:
    assert rates(4, shape=shape, warmup_steps=8) == pytest.approx([PEAK * (i + 1) / 8 for i in range(4)])


def test_beyond_the_end_the_rate_stays() -> None:
    config = ScheduleConfig(shape="linear", min_ratio=0.25)
    assert learning_rate(1000, steps=10, peak=PEAK, schedule=config) == pytest.approx(PEAK / 4)


def test_a_negative_step_is_refused() -> None:
    with pytest.raises(ValueError, match="negative"):
        learning_rate(-1, steps=10, peak=PEAK, schedule=ScheduleConfig())


@given(runs())
def test_rises_through_the_warm_up_then_never_rises(run: tuple[int, ScheduleConfig]) -> None:
    steps, config = run
    values = [learning_rate(step, steps=steps, peak=PEAK, schedule=config) for step in range(steps)]
    warm = min(config.warmup_steps, steps)
    assert all(a < b for a, b in pairwise(values[:warm]))
    tail = values[max(warm - 1, 0) :]
    assert all(a >= b * (1 - 1e-12) for a, b in pairwise(tail))


@given(runs())
def test_bounds(run: tuple[int, ScheduleConfig]) -> None:
    steps, config = run
    values = [learning_rate(step, steps=steps, peak=PEAK, schedule=config) for step in range(steps)]
    assert all(0 <= value <= PEAK * (1 + 1e-12) for value in values)
    assert values[0] > 0 or config.min_ratio == 0
    if config.warmup_steps < steps:
        assert min(values[config.warmup_steps :]) >= config.min_ratio * PEAK * (1 - 1e-12)
        assert max(values) == pytest.approx(PEAK) or config.warmup_steps == 0


@given(runs())
def test_ends_at_min_ratio(run: tuple[int, ScheduleConfig]) -> None:
    steps, config = run
    assume(config.shape != "constant" and max(config.warmup_steps, 1) < steps)
    last = learning_rate(steps - 1, steps=steps, peak=PEAK, schedule=config)
    assert last == pytest.approx(config.min_ratio * PEAK, abs=1e-15)


@given(runs())
def test_no_jump(run: tuple[int, ScheduleConfig]) -> None:
    """No two steps differ by more than the steepest slope that the schedule's pieces have."""
    steps, config = run
    assume(steps > 1)
    values = [learning_rate(step, steps=steps, peak=PEAK, schedule=config) for step in range(steps)]
    decay = steps - 1 - max(config.warmup_steps - 1, 0)
    if config.shape == "wsd":
        decay = min(decay, config.decay_steps or max(1, round(steps / 10)))
    slopes = [1 / max(config.warmup_steps, 1)]
    if config.shape != "constant" and decay > 0:
        slopes.append((math.pi / 2 if config.shape == "cosine" else 1) / decay)
    assert max(abs(b - a) for a, b in pairwise(values)) <= max(slopes) * PEAK * (1 + 1e-9)
