"""Learning rate of every step, as a pure function of the step number, so that a resumed run cannot get it wrong.

Sources: linear warm-up, Goyal et al. 2017 (arXiv:1706.02677); cosine, Loshchilov and Hutter 2017 (arXiv:1608.03983),
down to a tenth of the peak as in GPT-3 (arXiv:2005.14165); linear, Defazio et al. 2023 (arXiv:2310.07831);
wsd (warm-up, stable, decay), Hu et al. 2024 (MiniCPM, arXiv:2404.06395), with the linear decay over the last tenth
that Haegele et al. 2024 (arXiv:2405.18392) compare.
"""

import math

from fmengine.config.schema import ScheduleConfig

_WSD_DECAY_SHARE = 0.1


def learning_rate(step: int, *, steps: int, peak: float, schedule: ScheduleConfig) -> float:
    """Learning rate that optimizer step `step` uses.

    Warm-up gives step s the rate peak * (s + 1) / warmup_steps: the first update is not wasted on a rate of 0, and the
    last warm-up step has the peak. From there the shape runs to min_ratio * peak at the last step, steps - 1 (constant
    stays at the peak). A warm-up as long as the run or longer never ends: the rate is still climbing at the last step.

    Args:
        step: counted from 0; the rate stays at its last value beyond the end.
        steps: optimizer steps in the whole run.
        peak: largest learning rate.
        schedule: shape, warm-up, length of wsd's decay, and the final ratio.

    Raises:
        ValueError: where step is negative.
    """
    if step < 0:
        raise ValueError(f"step {step} is negative")
    step = min(step, steps - 1)
    if step < schedule.warmup_steps:
        return peak * (step + 1) / schedule.warmup_steps
    return peak * (schedule.min_ratio + (1 - schedule.min_ratio) * _remaining(step, steps, schedule))


def _remaining(step: int, steps: int, schedule: ScheduleConfig) -> float:
    """Share of the decay still to come after the warm-up: 1 at the peak, 0 at the last step."""
    start, end = max(schedule.warmup_steps - 1, 0), steps - 1
    if schedule.shape == "wsd":
        decay = schedule.decay_steps or max(1, round(steps * _WSD_DECAY_SHARE))
        start = max(start, end - decay)
    if schedule.shape == "constant" or step <= start:
        return 1.0
    progress = (step - start) / (end - start)
    if schedule.shape == "cosine":
        return (1 + math.cos(math.pi * progress)) / 2
    return 1 - progress
