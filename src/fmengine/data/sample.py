"""Windows of the token stream, and how some of them become one batch.

A document range is cut into windows: window w is the S + 1 tokens at offset w * S, of which the first S
are the input and the last S the targets; what is left behind the last whole window is dropped.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from fmengine.batch import IGNORE_INDEX, Batch
from fmengine.data.tokens import TokenReader, bin_path
from fmengine.errors import UserError

PADDING = -1
"""Window number of a row that holds nothing: every target is IGNORE_INDEX."""


@dataclass(frozen=True)
class Rows:
    """B windows as they lie in the stream.

    Attributes:
        tokens: int64 [B, S + 1]; a padding row is zeros.
        starts: for each row the places in (0, S] at which another document starts, ascending.
        padding: bool [B].
    """

    tokens: NDArray[np.int64]
    starts: list[NDArray[np.int64]]
    padding: NDArray[np.bool_]


class Windows:
    """The windows of a range of documents.

    Args:
        reader: the token data.
        documents: consecutive documents, a range with step 1.
        sequence_length: S, in tokens.
        vocab_size: ids are below this.

    Raises:
        UserError: the documents are shorter than one window.
    """

    def __init__(self, reader: TokenReader, documents: range, *, sequence_length: int, vocab_size: int) -> None:
        self.sequence_length = sequence_length
        self._reader = reader
        self.vocab_size = vocab_size
        self._start = reader.document_start(documents.start)
        tokens = reader.document_start(documents.stop) - self._start
        self._count = max(tokens - 1, 0) // sequence_length
        if not self._count:
            raise UserError(
                f"{bin_path(reader.prefix)}: documents {documents.start} to {documents.stop} hold {tokens} tokens and "
                f"a sample takes {sequence_length + 1}; give more data or a smaller data.sequence_length"
            )

    def __len__(self) -> int:
        """Whole windows."""
        return self._count

    def read(self, windows: NDArray[np.int64]) -> Rows:
        """The windows of these numbers, int64 [B]; PADDING gives a row of nothing.

        Raises:
            UserError: a token id is not in the vocabulary.
        """
        length = self.sequence_length + 1
        tokens = np.zeros((len(windows), length), np.int64)
        starts = [np.empty(0, np.int64)] * len(windows)
        for row, window in enumerate(windows.tolist()):
            if window != PADDING:
                first = self._start + window * self.sequence_length
                tokens[row] = self._reader.tokens(first, first + length)
                starts[row] = self._reader.starts_between(first, first + length) - first
        # As unsigned numbers the negative ones are too large as well.
        if int(tokens.view(np.uint64).max()) >= self.vocab_size:
            self._refuse(windows, tokens)
        return Rows(tokens, starts, windows == PADDING)

    def _refuse(self, windows: NDArray[np.int64], tokens: NDArray[np.int64]) -> None:
        row, column = np.argwhere(tokens.view(np.uint64) >= self.vocab_size)[0].tolist()
        place = self._start + int(windows[row]) * self.sequence_length + column
        document = self._reader.document_at(place)
        raise UserError(
            f"{bin_path(self._reader.prefix)}: document {document}, position "
            f"{place - self._reader.document_start(document)}: token id {int(tokens[row, column])} is not below the "
            f"vocabulary's {self.vocab_size}; prepare the data with the model's tokenizer"
        )


def documents_capacity(micro_batch_size: int, sequence_length: int) -> int:
    """Length that cu_seqlens has in nearly every batch: room for a document each 64 tokens, at least 8 a row."""
    tokens = micro_batch_size * sequence_length
    return min(micro_batch_size * max(8, sequence_length // 64), tokens) + 1


@dataclass(frozen=True)
class Packing:
    """How rows become a batch; the same for every batch of a loader.

    Attributes:
        mask_documents: positions restart and attention ends at documents, and the target that opens another
            document than its input's is IGNORE_INDEX; else each row is one document.
        fixed_documents: cu_seqlens always has B * S + 1 entries; else as `documents_capacity` says, doubled
            until the documents fit.
        part: which of the S tokens this rank holds.
    """

    mask_documents: bool
    fixed_documents: bool
    part: slice


def make_batch(rows: Rows, packing: Packing) -> Batch:
    """One micro-batch from its B rows of S + 1 tokens."""
    size, length = rows.tokens.shape[0], rows.tokens.shape[1] - 1
    targets = rows.tokens[:, 1:].copy()
    targets[rows.padding] = IGNORE_INDEX
    first = [np.arange(0, size * length, length)]
    if packing.mask_documents:
        places = [row * length + starts for row, starts in enumerate(rows.starts)]
        targets.reshape(-1)[np.concatenate(places) - 1] = IGNORE_INDEX
        # A document that starts right behind the row's input opens the next row, which is a bound already.
        first += [place[starts < length] for place, starts in zip(places, rows.starts, strict=True)]
    bounds = np.sort(np.concatenate(first))
    lengths = np.diff(bounds, append=size * length)
    positions = (np.arange(size * length) - np.repeat(bounds, lengths)).reshape(size, length)
    capacity = size * length + 1 if packing.fixed_documents else documents_capacity(size, length)
    while capacity < len(bounds) + 1:
        capacity = min(2 * capacity, size * length + 1)
    cu_seqlens = np.full(capacity, size * length, np.int32)
    cu_seqlens[: len(bounds)] = bounds
    return Batch(
        input_ids=torch.from_numpy(np.ascontiguousarray(rows.tokens[:, :-1][:, packing.part])),
        targets=torch.from_numpy(np.ascontiguousarray(targets[:, packing.part])),
        position_ids=torch.from_numpy(np.ascontiguousarray(positions[:, packing.part])),
        cu_seqlens=torch.from_numpy(cu_seqlens),
    )
