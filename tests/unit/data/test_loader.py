import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fmengine.batch import IGNORE_INDEX
from fmengine.config.batch import BatchSizes
from fmengine.data.loader import EvalLoader, TrainLoader, split_documents
from fmengine.data.tokens import TokenReader
from fmengine.errors import UserError
from fmengine.parallel import Topology
from support.data import write_documents

LENGTH = 4


def counting_data(folder: Path, windows: int) -> TokenReader:
    """One document 0, 1, 2, ...: the first input of a row tells its window."""
    return write_documents(folder / "d", [list(range(windows * LENGTH + 1))], vocab_size=10**6)


def loader(reader: TokenReader, dp: int, rank: int, accumulation: int, micro: int, **options) -> TrainLoader:
    return TrainLoader(
        reader,
        documents=range(reader.num_documents),
        sequence_length=LENGTH,
        sizes=BatchSizes(dp * accumulation * micro, micro, accumulation),
        topology=Topology(rank, dp),
        seed=options.pop("seed", 1),
        vocab_size=10**6,
        **options,
    )


def global_batch(reader: TokenReader, step: int, dp: int, accumulation: int, micro: int) -> list[int]:
    """Windows of a step in the order of the sample numbers, put together from all ranks."""
    ranks = [loader(reader, dp, rank, accumulation, micro).step(step) for rank in range(dp)]
    rows = [ranks[rank][m].input_ids for m in range(accumulation) for rank in range(dp)]
    return (torch.cat(rows)[:, 0] // LENGTH).tolist()


@settings(max_examples=30)
@given(windows=st.integers(1, 40), step=st.integers(0, 20), split=st.permutations([1, 2, 3]))
def test_the_order_does_not_depend_on_ranks_or_accumulation(windows: int, step: int, split: list[int]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        reader = counting_data(Path(folder), windows)
        expected = global_batch(reader, step, 1, 1, 6)
        assert global_batch(reader, step, *split) == expected
        assert global_batch(reader, step, 6, 1, 1) == expected
        assert global_batch(reader, step, 1, 6, 1) == expected


@settings(max_examples=30)
@given(windows=st.integers(1, 40), batch=st.integers(1, 7))
def test_each_window_comes_once_an_epoch(windows: int, batch: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        one = loader(counting_data(Path(folder), windows), 1, 0, 1, batch)
        steps = -(-3 * windows // batch)
        seen = [int(row) // LENGTH for step in range(steps) for row in one.step(step)[0].input_ids[:, 0]]
    for epoch in range(3):
        assert sorted(seen[epoch * windows : (epoch + 1) * windows]) == list(range(windows))


def test_epochs_and_seeds_have_their_own_order(tmp_path: Path) -> None:
    reader = counting_data(tmp_path, 30)
    orders = [global_batch(reader, step, 1, 1, 30) for step in range(4)]
    orders.append((loader(reader, 1, 0, 1, 30, seed=2).step(0)[0].input_ids[:, 0] // LENGTH).tolist())
    assert len({tuple(order) for order in orders}) == 5


def test_a_step_needs_no_step_before_it(tmp_path: Path) -> None:
    reader = counting_data(tmp_path, 13)
    straight = loader(reader, 2, 1, 2, 1)
    batches = [straight.step(step) for step in range(12)]
    resumed = loader(reader, 2, 1, 2, 1)
    for step in (11, 5, 7):
        for ours, theirs in zip(resumed.step(step), batches[step], strict=True):
            assert all(torch.equal(getattr(ours, name), getattr(theirs, name)) for name in vars(ours))


def test_model_parallel_ranks_see_the_same_samples(tmp_path: Path) -> None:
    reader = counting_data(tmp_path, 13)

    def first(rank: int) -> torch.Tensor:
        topology = Topology(rank, 8, tensor_parallel_size=2, pipeline_parallel_size=2)
        return TrainLoader(
            reader, documents=range(1), sequence_length=LENGTH, sizes=BatchSizes(2, 1, 1), topology=topology, seed=1,
            vocab_size=10**6,
        ).step(0)[0].input_ids  # fmt: skip

    seen = [first(rank) for rank in range(8)]
    for rank in range(8):
        assert torch.equal(seen[rank], seen[2 * Topology(rank, 8, 2, 2).data_rank])
    assert not torch.equal(seen[0], seen[2])


def test_sequence_ranks_split_the_row(tmp_path: Path) -> None:
    reader = counting_data(tmp_path, 13)
    parts = [
        TrainLoader(
            reader, documents=range(1), sequence_length=LENGTH, sizes=BatchSizes(2, 2, 1), seed=1, vocab_size=10**6,
            topology=Topology(rank, 2, sequence_parallel_size=2),
        ).step(3)[0]
        for rank in range(2)
    ]  # fmt: skip
    whole = loader(reader, 1, 0, 1, 2).step(3)[0]
    assert torch.equal(torch.cat([part.targets for part in parts], 1), whole.targets)
    assert torch.equal(parts[1].position_ids, whole.position_ids[:, 2:])


def test_a_sequence_that_does_not_split_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"data\.sequence_length: 4 is not divisible .* 3"):
        TrainLoader(
            counting_data(tmp_path, 3), documents=range(1), sequence_length=LENGTH, sizes=BatchSizes(1, 1, 1), seed=1,
            vocab_size=10**6, topology=Topology(0, 3, sequence_parallel_size=3),
        )  # fmt: skip


def test_sizes_that_do_not_fit_the_topology_are_a_bug(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="does not fit 2 replicas"):
        TrainLoader(
            counting_data(tmp_path, 3), documents=range(1), sequence_length=LENGTH, sizes=BatchSizes(3, 1, 2), seed=1,
            vocab_size=10**6, topology=Topology(0, 2),
        )  # fmt: skip


def test_the_split_is_at_a_document_and_at_the_end(tmp_path: Path) -> None:
    reader = write_documents(tmp_path / "d", [[i] * 5 for i in range(10)])
    assert split_documents(reader, 0.0) == (range(10), range(10, 10))
    assert split_documents(reader, 0.2) == (range(8), range(8, 10))
    assert split_documents(reader, 0.001) == (range(9), range(9, 10))
    train = loader(reader, 1, 0, 1, 1)
    assert train.samples_per_epoch == 12


def test_one_document_cannot_be_split(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"data\.validation_fraction: .* one document"):
        split_documents(write_documents(tmp_path / "d", [[1]]), 0.1)


def evaluation(reader: TokenReader, dp: int, rank: int, samples: int, micro: int = 2, mask: bool = True) -> EvalLoader:
    return EvalLoader(
        reader, documents=range(reader.num_documents), sequence_length=LENGTH, eval_samples=samples,
        micro_batch_size=micro, topology=Topology(rank, dp), vocab_size=10**6, mask_documents=mask,
    )  # fmt: skip


@pytest.mark.parametrize(("dp", "samples"), [(1, 7), (2, 7), (3, 7), (4, 3), (2, 100)])
def test_evaluation_covers_each_window_once(tmp_path: Path, dp: int, samples: int) -> None:
    reader = counting_data(tmp_path, 9)
    ranks = [evaluation(reader, dp, rank, samples) for rank in range(dp)]
    batches = [list(rank) for rank in ranks]
    assert {len(part) for part in batches} == {len(ranks[0])}
    targets = [row for number in range(len(ranks[0])) for part in batches for row in part[number].targets.tolist()]
    real = [row for row in targets if row != [IGNORE_INDEX] * LENGTH]
    expected = [number * 9 // min(samples, 9) for number in range(min(samples, 9))]  # spread evenly
    assert real == [list(range(w * LENGTH + 1, (w + 1) * LENGTH + 1)) for w in expected]


@pytest.mark.parametrize("mask", [True, False])
def test_bytes_are_those_of_the_targets_of_all_ranks(tmp_path: Path, mask: bool) -> None:
    reader = write_documents(tmp_path / "d", [[1, 2, 3], [4, 5, 6, 7], [8, 9, 1, 2, 3, 4, 5, 6]], vocab_size=10**6)
    lengths = np.array([0, 1, 2, 3, 4, 5, 6, 7, 8, 9], np.int32)
    ranks = [evaluation(reader, 2, rank, 3, micro=1, mask=mask) for rank in range(2)]
    targets = torch.cat([batch.targets for rank in ranks for batch in rank]).flatten()
    expected = int(lengths[targets[targets != IGNORE_INDEX].numpy()].sum())
    assert [rank.target_bytes(lengths) for rank in ranks] == [expected, expected]
    assert expected == 2 + 3 + 5 + 6 + 7 + 9 + 1 + 2 + 3 + 4 + (0 if mask else 4 + 8)


def test_bytes_do_not_depend_on_sequence_parallelism(tmp_path: Path) -> None:
    reader = counting_data(tmp_path, 3)
    parts = [
        EvalLoader(
            reader,
            documents=range(1),
            sequence_length=LENGTH,
            eval_samples=3,
            micro_batch_size=1,
            topology=Topology(rank, 2, sequence_parallel_size=2),
            vocab_size=10**6,
        )
        for rank in range(2)
    ]
    assert [part.target_bytes(np.arange(13)) for part in parts] == [sum(range(1, 13))] * 2
