"""Every precision and ZeRO stage on one GPU, close to fp32; and a resumed run that is the undisturbed one."""

from pathlib import Path

import pytest
import torch

from support.resuming import HALF, go_on, loader_of, make_data
from support.training import Case, make_engine, train

DEVICE = "cuda:0"
WIDE = {"hidden_size": 64, "head_dim": 16}
"""Heads of a width that the GPU's attention kernels take."""


def case(stage: int, precision: str, model: str = "llama") -> Case:
    options = WIDE if model == "llama" else {"hidden_size": 64}
    return Case({"zero_stage": stage}, micro_batch_size=4, precision=precision, model=model, options=options)


@pytest.mark.parametrize("model", ["llama", "neox"])
def test_every_precision_follows_fp32(model):
    engine, plan = make_engine(case(1, "fp32", model), device=DEVICE)
    wanted = [loss for loss, _, _ in train(engine, plan, 10)]
    for stage, precision in [(0, "fp32"), (2, "fp32"), (3, "fp32")]:
        engine, plan = make_engine(case(stage, precision, model), device=DEVICE)
        assert [loss for loss, _, _ in train(engine, plan, 10)] == pytest.approx(wanted, rel=1e-4), stage
    for stage in (1, 2, 3):
        for precision in ("bf16", "fp16"):
            engine, plan = make_engine(case(stage, precision, model), device=DEVICE)
            losses = train_applied(engine, plan)
            assert losses == pytest.approx(wanted, rel=2e-2), (stage, precision)


def train_applied(engine, plan) -> list[float]:
    """Losses of 10 steps; fp16's first loss scales are too large, so the steps it throws away come first."""
    from support.training import step_batches

    losses = []
    while len(losses) < 10:
        result = engine.train_step(step_batches(len(losses), plan.sizes, plan.topology))
        if not result.skipped:
            losses.append(float(result.loss))
    return losses


@pytest.fixture
def deterministic():
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_resume_is_bit_identical(stage, tmp_path: Path, deterministic):
    prefix = make_data(tmp_path)
    engine, plan = make_engine(case(stage, "bf16"), device=DEVICE)
    loader = loader_of(plan, prefix)
    straight = go_on(engine, loader, 2 * HALF)
    engine, plan = make_engine(case(stage, "bf16"), device=DEVICE)
    go_on(engine, loader, HALF)
    folder = tmp_path / "engine"
    folder.mkdir()
    engine.save(folder)
    engine, plan = make_engine(case(stage, "bf16"), device=DEVICE)
    engine.load(folder)
    assert go_on(engine, loader, HALF) == straight[HALF:]
