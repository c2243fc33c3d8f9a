from itertools import product

import pytest

from fmengine.config.batch import BatchSizes, solve
from fmengine.config.schema import BatchConfig
from fmengine.errors import UserError

SIDES = list(product((1, 2, 3, 5), (1, 2, 3, 7), (1, 2, 4, 6)))


@pytest.mark.parametrize(("micro", "accumulation", "replicas"), SIDES)
def test_any_two_sides_give_the_third(micro: int, accumulation: int, replicas: int) -> None:
    sizes = BatchSizes(micro * accumulation * replicas, micro, accumulation)
    given = {
        "global_batch_size": sizes.global_batch_size,
        "micro_batch_size": micro,
        "gradient_accumulation_steps": accumulation,
    }
    assert solve(BatchConfig(**given), replicas) == sizes
    for left_out in given:
        assert solve(BatchConfig(**{k: v for k, v in given.items() if k != left_out}), replicas) == sizes


@pytest.mark.parametrize(
    ("given", "sizes"),
    [
        ({"global_batch_size": 12}, BatchSizes(12, 4, 1)),
        ({"micro_batch_size": 4}, BatchSizes(12, 4, 1)),
        ({"gradient_accumulation_steps": 4}, BatchSizes(12, 1, 4)),
    ],
)
def test_one_side_alone(given: dict[str, int], sizes: BatchSizes) -> None:
    assert solve(BatchConfig(**given), 3) == sizes


def test_every_solution_keeps_the_product_and_what_was_given() -> None:
    for whole, micro, accumulation in product((None, 4, 12, 30), (None, 1, 2, 4), (None, 1, 3)):
        batch = BatchConfig(global_batch_size=whole, micro_batch_size=micro, gradient_accumulation_steps=accumulation)
        for replicas in (1, 2, 3):
            try:
                sizes = solve(batch, replicas)
            except UserError:
                side = (micro or 1) * (accumulation or 1) * replicas
                nothing_given = (whole, micro, accumulation) == (None, None, None)
                assert nothing_given or (whole or 0) % side or (micro and accumulation and whole != side)
                continue
            assert sizes.global_batch_size == sizes.micro_batch_size * sizes.gradient_accumulation_steps * replicas
            assert whole in (None, sizes.global_batch_size)
            assert micro in (None, sizes.micro_batch_size)
            assert accumulation in (None, sizes.gradient_accumulation_steps)


@pytest.mark.parametrize(
    ("given", "parts"),
    [
        ({}, ["batch.global_batch_size: not given"]),
        ({"global_batch_size": 10}, ["10 is not divisible by 4 data-parallel", "10 / 4 = 2.5", "8 or 12 would fit"]),
        (
            {"global_batch_size": 10, "micro_batch_size": 3},
            ["3 micro_batch_size x 4 data-parallel = 12", "10 / 12 = 0.8333", "12 would fit"],
        ),
        ({"global_batch_size": 25, "gradient_accumulation_steps": 3}, ["25 / 12 = 2.083", "24 or 36 would fit"]),
        (
            {"global_batch_size": 25, "gradient_accumulation_steps": 3, "micro_batch_size": 2},
            ["2 micro_batch_size x 3 gradient_accumulation_steps x 4 data-parallel = 24, not 25"],
        ),
    ],
)
def test_contradictions_show_the_arithmetic(given: dict[str, int], parts: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        solve(BatchConfig(**given), 4)
    assert all(part in str(caught.value) for part in parts), str(caught.value)
