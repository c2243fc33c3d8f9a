import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fmengine.batch import IGNORE_INDEX, Batch
from fmengine.data.sample import PADDING, Packing, Windows, documents_capacity, make_batch
from fmengine.errors import UserError
from support.data import write_documents

WHOLE = slice(None)
lists_of_lengths = st.lists(st.integers(0, 9), min_size=1, max_size=20).filter(lambda lengths: sum(lengths) > 8)


def plain_row(tokens: list[int], owners: list[int]) -> tuple[list[int], list[int], list[int]]:
    """Targets, positions and document starts of one window, written one token at a time."""
    targets, positions, starts = [], [], []
    for i in range(len(tokens) - 1):
        targets.append(tokens[i + 1] if owners[i + 1] == owners[i] else IGNORE_INDEX)
        fresh = i == 0 or owners[i] != owners[i - 1]
        positions.append(0 if fresh else positions[-1] + 1)
        if fresh:
            starts.append(i)
    return targets, positions, starts


@settings(max_examples=40)
@given(lengths=lists_of_lengths, sequence_length=st.integers(2, 8), data=st.data())
def test_a_batch_is_what_a_loop_over_tokens_makes(
    lengths: list[int], sequence_length: int, data: st.DataObject
) -> None:
    owners = [number for number, length in enumerate(lengths) for _ in range(length)]
    with tempfile.TemporaryDirectory() as folder:
        documents = [[10 * i + j for j in range(length)] for i, length in enumerate(lengths)]
        reader = write_documents(Path(folder) / "d", documents)
        windows = Windows(reader, range(len(lengths)), sequence_length=sequence_length, vocab_size=1000)
        ids = data.draw(st.lists(st.integers(0, len(windows) - 1), min_size=1, max_size=4))
        rows = windows.read(np.array(ids))
        stream = reader.tokens(0, reader.num_tokens).tolist()
    batch = make_batch(rows, Packing(mask_documents=True, fixed_documents=False, part=WHOLE))
    bounds = []
    for row, window in enumerate(ids):
        here = slice(window * sequence_length, (window + 1) * sequence_length + 1)
        targets, positions, starts = plain_row(stream[here], owners[here])
        assert batch.input_ids[row].tolist() == stream[here][:-1]
        assert batch.targets[row].tolist() == targets
        assert batch.position_ids[row].tolist() == positions
        bounds += [row * sequence_length + start for start in starts]
    total = len(ids) * sequence_length
    assert batch.cu_seqlens.tolist() == bounds + [total] * (len(batch.cu_seqlens) - len(bounds))
    assert len(batch.cu_seqlens) <= total + 1


@pytest.fixture
def rows(tmp_path: Path):
    reader = write_documents(tmp_path / "d", [[1, 2, 3], [4, 5, 6, 7, 8], [9]])
    return Windows(reader, range(3), sequence_length=4, vocab_size=10).read(np.array([0, 1, PADDING]))


def test_masking_off_makes_each_row_one_document(rows) -> None:
    batch = make_batch(rows, Packing(mask_documents=False, fixed_documents=False, part=WHOLE))
    assert batch.targets.tolist() == [[2, 3, 4, 5], [6, 7, 8, 9], [IGNORE_INDEX] * 4]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3]] * 3
    assert batch.cu_seqlens.unique().tolist() == [0, 4, 8, 12]


def test_the_first_token_of_the_next_document_is_no_target(rows) -> None:
    batch = make_batch(rows, Packing(mask_documents=True, fixed_documents=False, part=WHOLE))
    # The last target of row 1 opens document 2, which starts right behind the row's input.
    assert batch.targets.tolist() == [[2, 3, IGNORE_INDEX, 5], [6, 7, 8, IGNORE_INDEX], [IGNORE_INDEX] * 4]
    assert batch.position_ids.tolist() == [[0, 1, 2, 0], [0, 1, 2, 3], [0, 1, 2, 3]]
    assert batch.cu_seqlens.unique().tolist() == [0, 3, 4, 8, 12]


def test_dtypes_are_the_contract(rows) -> None:
    batch = make_batch(rows, Packing(mask_documents=True, fixed_documents=False, part=WHOLE))
    assert batch.input_ids.dtype == batch.targets.dtype == batch.position_ids.dtype == torch.int64
    assert batch.cu_seqlens.dtype == torch.int32


def test_sequence_parts_join_to_the_whole(rows) -> None:
    whole, left, right = (
        make_batch(rows, Packing(mask_documents=True, fixed_documents=False, part=part))
        for part in (WHOLE, slice(0, 2), slice(2, 4))
    )
    for name in ("input_ids", "targets", "position_ids"):
        assert torch.equal(torch.cat([getattr(left, name), getattr(right, name)], 1), getattr(whole, name))
    assert torch.equal(left.cu_seqlens, whole.cu_seqlens)
    assert torch.equal(right.cu_seqlens, whole.cu_seqlens)


def batch_of_short_documents(folder: Path, length: int, fixed: bool) -> Batch:
    reader = write_documents(folder / "d", [[1] * length] * (1026 // length + 1))
    windows = Windows(reader, range(reader.num_documents), sequence_length=512, vocab_size=10)
    return make_batch(windows.read(np.arange(2)), Packing(mask_documents=True, fixed_documents=fixed, part=WHOLE))


def test_the_length_of_cu_seqlens_doubles_until_documents_fit(tmp_path: Path) -> None:
    base = documents_capacity(2, 512)
    assert base == 17
    assert len(batch_of_short_documents(tmp_path, 100, fixed=False).cu_seqlens) == base
    assert len(batch_of_short_documents(tmp_path, 20, fixed=False).cu_seqlens) == 4 * base
    assert len(batch_of_short_documents(tmp_path, 1, fixed=False).cu_seqlens) == 2 * 512 + 1
    assert len(batch_of_short_documents(tmp_path, 100, fixed=True).cu_seqlens) == 2 * 512 + 1


def test_the_length_is_never_more_than_the_tokens() -> None:
    assert documents_capacity(3, 2) == 3 * 2 + 1


def test_windows_stay_inside_their_documents(tmp_path: Path) -> None:
    reader = write_documents(tmp_path / "d", [[1] * 7, [2] * 9, [3] * 7])
    windows = Windows(reader, range(1, 2), sequence_length=4, vocab_size=10)
    assert len(windows) == 2
    assert (windows.read(np.arange(2)).tokens == 2).all()


def test_data_shorter_than_a_window_is_refused(tmp_path: Path) -> None:
    reader = write_documents(tmp_path / "d", [[1, 2], [3, 4]])
    assert len(Windows(reader, range(2), sequence_length=3, vocab_size=10)) == 1
    with pytest.raises(UserError, match=r"d\.bin: documents 0 to 2 hold 4 tokens and a sample takes 5"):
        Windows(reader, range(2), sequence_length=4, vocab_size=10)
    with pytest.raises(UserError, match="hold 0 tokens"):
        Windows(reader, range(2, 2), sequence_length=3, vocab_size=10)


def test_an_id_beyond_the_vocabulary_is_located(tmp_path: Path) -> None:
    reader = write_documents(tmp_path / "d", [[1] * 6, [2, 2, 50, 2, 2, 2]])
    windows = Windows(reader, range(2), sequence_length=4, vocab_size=50)
    windows.read(np.array([0]))
    with pytest.raises(UserError, match=r"d\.bin: document 1, position 2: token id 50 is not below .* 50;"):
        windows.read(np.array([0, 1]))


def test_a_negative_id_is_located(tmp_path: Path) -> None:
    reader = write_documents(tmp_path / "d", [[1, 2, -3, 4]], vocab_size=10**6)
    with pytest.raises(UserError, match="document 0, position 2: token id -3"):
        Windows(reader, range(1), sequence_length=3, vocab_size=50).read(np.array([0]))
