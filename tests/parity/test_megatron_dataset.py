"""Our .bin/.idx and megatron-core's are one format, in both directions, token for token."""

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from megatron.core.datasets import indexed_dataset as megatron

from fmengine.data.tokens import DTYPES, TokenReader, bin_path, idx_path
from support.data import write_documents

DOCUMENTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9], [10, 11]]


@pytest.mark.parametrize("vocab_size", [1000, 200_000])
def test_megatron_reads_ours(tmp_path: Path, vocab_size: int) -> None:
    documents = [*DOCUMENTS, [vocab_size - 1]]
    write_documents(tmp_path / "ours", documents, vocab_size)
    theirs = megatron.IndexedDataset(str(tmp_path / "ours"))
    assert [theirs[i].tolist() for i in range(len(theirs))] == documents
    assert theirs.document_indices.tolist() == list(range(len(documents) + 1))
    assert theirs.index.dtype == (np.uint16 if vocab_size == 1000 else np.int32)


@pytest.mark.parametrize("vocab_size", [1000, 200_000])
def test_the_files_are_equal_byte_for_byte(tmp_path: Path, vocab_size: int) -> None:
    write_documents(tmp_path / "ours", DOCUMENTS, vocab_size)
    dtype = megatron.DType.optimal_dtype(vocab_size)
    builder = megatron.IndexedDatasetBuilder(str(bin_path(tmp_path / "theirs")), dtype=dtype)
    for document in DOCUMENTS:
        builder.add_document(torch.tensor(document), [len(document)])
    builder.finalize(str(idx_path(tmp_path / "theirs")))
    for path in (bin_path, idx_path):
        assert path(tmp_path / "ours").read_bytes() == path(tmp_path / "theirs").read_bytes()


@pytest.mark.parametrize("code", sorted(DTYPES))
def test_we_read_every_integer_dtype(tmp_path: Path, code: int) -> None:
    dtype = megatron.DType.dtype_from_code(code)
    builder = megatron.IndexedDatasetBuilder(str(bin_path(tmp_path / "theirs")), dtype=dtype)
    for document in DOCUMENTS:
        builder.add_document(torch.tensor(document), [len(document)])
    builder.finalize(str(idx_path(tmp_path / "theirs")))
    reader = TokenReader(tmp_path / "theirs")
    assert reader.dtype == dtype
    starts = [reader.document_start(i) for i in range(reader.num_documents + 1)]
    assert [reader.tokens(*pair).tolist() for pair in pairwise(starts)] == DOCUMENTS


@pytest.mark.parametrize("multimodal", [False, True])
def test_we_read_documents_of_several_sentences(tmp_path: Path, multimodal: bool) -> None:
    builder = megatron.IndexedDatasetBuilder(str(bin_path(tmp_path / "d")), dtype=np.uint16, multimodal=multimodal)
    for sentences in ([[1, 2], [3]], [[4]], [], [[5, 6, 7], [8], [9, 10]]):
        for sentence in sentences:
            builder.add_item(torch.tensor(sentence))
        builder.end_document()
    builder.finalize(str(idx_path(tmp_path / "d")))
    reader = TokenReader(tmp_path / "d")
    assert [reader.document_start(i) for i in range(reader.num_documents + 1)] == [0, 3, 4, 4, 10]
    assert reader.tokens(0, 10).tolist() == list(range(1, 11))
    assert [reader.document_at(i) for i in range(10)] == [0, 0, 0, 1, 3, 3, 3, 3, 3, 3]
    assert reader.starts_between(0, 10).tolist() == [3, 4]


def test_we_read_what_megatron_merged(tmp_path: Path) -> None:
    write_documents(tmp_path / "a", DOCUMENTS)
    write_documents(tmp_path / "b", [[20, 21], [22]])
    builder = megatron.IndexedDatasetBuilder(str(bin_path(tmp_path / "both")), dtype=np.uint16)
    builder.add_index(str(tmp_path / "a"))
    builder.add_index(str(tmp_path / "b"))
    builder.finalize(str(idx_path(tmp_path / "both")))
    reader = TokenReader(tmp_path / "both")
    assert reader.num_documents == 6
    assert reader.tokens(11, 14).tolist() == [20, 21, 22]
