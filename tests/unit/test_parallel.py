"""Which rank is which: against the documented order, and against DeepSpeed's own grid."""

from itertools import product

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from fmengine.errors import UserError
from fmengine.parallel import Topology

AXES = ("pipe", "data", "sequence", "tensor")
"""Slowest first."""


@st.composite
def grids(draw: st.DrawFn) -> tuple[int, int, int, int]:
    """Sizes of pipe, data, sequence and tensor."""
    size = st.integers(1, 4)
    return draw(size), draw(size), draw(size), draw(size)


def ranks(grid: tuple[int, int, int, int]) -> list[Topology]:
    pipe, data, sequence, tensor = grid
    world = pipe * data * sequence * tensor
    return [
        Topology(
            rank,
            world,
            tensor_parallel_size=tensor,
            pipeline_parallel_size=pipe,
            sequence_parallel_size=sequence,
        )
        for rank in range(world)
    ]


def coordinates(topology: Topology) -> tuple[int, ...]:
    return tuple(getattr(topology, f"{axis}_rank") for axis in AXES)


@given(grids())
def test_each_rank_has_one_place_and_each_place_one_rank_the_tensor_axis_fastest(
    grid: tuple[int, int, int, int],
) -> None:
    assert [coordinates(topology) for topology in ranks(grid)] == list(product(*map(range, grid)))


@given(grids())
def test_the_data_axis_takes_what_is_left(grid: tuple[int, int, int, int]) -> None:
    assert {topology.data_parallel_size for topology in ranks(grid)} == {grid[1]}


@given(grids(), st.data())
def test_neighbours(grid: tuple[int, int, int, int], data: st.DataObject) -> None:
    """A step along an axis is a step in rank of the product of the faster axes: tensor 1, sequence tensor, ..."""
    there = ranks(grid)
    axis = data.draw(st.integers(0, 3))
    assume(grid[axis] > 1)
    here = data.draw(st.sampled_from([t for t in there if coordinates(t)[axis] < grid[axis] - 1]))
    stride = 1
    for size in grid[axis + 1 :]:
        stride *= size
    expected = list(coordinates(here))
    expected[axis] += 1
    assert coordinates(there[here.rank + stride]) == tuple(expected)


@given(grids())
def test_deepspeed_has_the_same_order(grid: tuple[int, int, int, int]) -> None:
    from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology

    pipe, data, _, tensor = grid  # its grid knows no sequence axis
    theirs = PipeModelDataParallelTopology(num_pp=pipe, num_dp=data, num_mp=tensor)
    for topology in ranks((pipe, data, 1, tensor)):
        place = {"pipe": topology.pipe_rank, "data": topology.data_rank, "model": topology.tensor_rank}
        assert theirs.get_rank(**place) == topology.rank


def test_written_out() -> None:
    """Eight ranks, two stages of two replicas of two tensor shards."""
    assert [coordinates(t) for t in ranks((2, 2, 1, 2))] == [
        (0, 0, 0, 0),
        (0, 0, 0, 1),
        (0, 1, 0, 0),
        (0, 1, 0, 1),
        (1, 0, 0, 0),
        (1, 0, 0, 1),
        (1, 1, 0, 0),
        (1, 1, 0, 1),
    ]


def test_a_world_that_does_not_divide_is_refused_with_the_arithmetic() -> None:
    with pytest.raises(UserError, match=r"tensor 2 x pipeline 3 x sequence 1 = 6 does not divide the world size 8"):
        Topology(0, 8, tensor_parallel_size=2, pipeline_parallel_size=3)
