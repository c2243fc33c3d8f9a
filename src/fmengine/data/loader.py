"""Which samples an optimizer step takes: a pure function of the step, the seed and the data.

Sample n is window permutation(epoch)[n mod W] with epoch = n div W, for W windows; optimizer step t takes
the samples t * G to t * G + G - 1 of global batch size G. Data rank r's micro-batch m takes samples
t * G + (m * dp + r) * mb + j, so that neither the set of samples nor their order depends on the number
of replicas dp, on the micro-batch size mb or on accumulation, and resuming takes one integer.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fmengine.batch import IGNORE_INDEX, Batch
from fmengine.config.batch import BatchSizes
from fmengine.config.schema import DataConfig
from fmengine.data.order import Permutation
from fmengine.data.sample import PADDING, Packing, Windows, make_batch
from fmengine.data.tokens import TokenReader
from fmengine.errors import UserError
from fmengine.parallel import Topology


def split_documents(reader: TokenReader, validation_fraction: float) -> tuple[range, range]:
    """Training and validation documents: the last share of them is held out, at least one when it is not 0.

    Raises:
        UserError: a share is asked for and there is only one document.
    """
    count = reader.num_documents
    held_out = max(1, round(count * validation_fraction)) if validation_fraction else 0
    if held_out >= count:
        raise UserError(
            f"data.validation_fraction: {reader.prefix} has one document, none can be held out; "
            "give data.validation or set the fraction to 0"
        )
    return range(count - held_out), range(count - held_out, count)


def training_documents(data: DataConfig, reader: TokenReader) -> tuple[range, range]:
    """Documents of `data.train` to train on, and those held out: none where `data.validation` is given."""
    return split_documents(reader, data.validation_fraction if data.validation is None else 0.0)


def samples_per_epoch(data: DataConfig) -> int:
    """Samples in one pass over the training documents; fixed costs only.

    Raises:
        UserError: `data.train` is missing, damaged or too short.
    """
    if data.train is None:
        raise UserError("data.train: not given")
    reader = TokenReader(data.train)
    documents, _ = training_documents(data, reader)
    return len(Windows(reader, documents, sequence_length=data.sequence_length, vocab_size=1))


def _sequence_part(topology: Topology, sequence_length: int) -> slice:
    """The tokens of each row that this rank holds under sequence parallelism."""
    parts = topology.sequence_parallel_size
    if sequence_length % parts:
        raise UserError(
            f"data.sequence_length: {sequence_length} is not divisible by parallel.sequence_parallel_size {parts}; "
            "change one of them"
        )
    size = sequence_length // parts
    return slice(topology.sequence_rank * size, (topology.sequence_rank + 1) * size)


class TrainLoader:
    """The micro-batches of this rank for any optimizer step.

    Args:
        reader: the token data.
        documents: the documents to train on.
        sequence_length: S, tokens in a sample.
        sizes: the batch triangle; global = micro x accumulation x data-parallel size.
        topology: this rank's place.
        seed: fixes the order.
        vocab_size: ids are below this.
        mask_documents: packed documents do not see one another.
        fixed_documents: cu_seqlens has the same length in every batch (pipeline stages need that).

    Raises:
        UserError: the data is shorter than one window, or S does not split over the sequence ranks.
    """

    def __init__(
        self,
        reader: TokenReader,
        *,
        documents: range,
        sequence_length: int,
        sizes: BatchSizes,
        topology: Topology,
        seed: int,
        vocab_size: int,
        mask_documents: bool = True,
        fixed_documents: bool = False,
    ) -> None:
        self._windows = Windows(reader, documents, sequence_length=sequence_length, vocab_size=vocab_size)
        self._sizes = sizes
        self._topology = topology
        self._seed = seed
        self._packing = Packing(mask_documents, fixed_documents, _sequence_part(topology, sequence_length))
        per_micro_step = sizes.micro_batch_size * topology.data_parallel_size
        if sizes.global_batch_size != per_micro_step * sizes.gradient_accumulation_steps:
            raise ValueError(f"{sizes} does not fit {topology.data_parallel_size} replicas")

    @property
    def samples_per_epoch(self) -> int:
        """Windows in the training documents."""
        return len(self._windows)

    def step(self, step: int) -> list[Batch]:
        """The `gradient_accumulation_steps` micro-batches of optimizer step `step`, counted from 0.

        Raises:
            UserError: a token id beyond the vocabulary, by file, document and position.
        """
        sizes, topology = self._sizes, self._topology
        micro = np.arange(sizes.gradient_accumulation_steps)[:, None] * topology.data_parallel_size
        samples = (
            step * sizes.global_batch_size
            + (micro + topology.data_rank) * sizes.micro_batch_size
            + np.arange(sizes.micro_batch_size)
        )
        windows = self._order(samples)
        return [make_batch(self._windows.read(row), self._packing) for row in windows]

    def _order(self, samples: NDArray[np.int64]) -> NDArray[np.int64]:
        """Window number of each sample number, int64 of any shape."""
        epochs, places = np.divmod(samples, len(self._windows))
        windows = np.empty_like(places)
        for epoch in np.unique(epochs).tolist():
            here = epochs == epoch
            windows[here] = Permutation(len(self._windows), self._seed, epoch)(places[here])
        return windows


class EvalLoader:
    """Windows of the validation documents, evenly spread over them and in their order, split over the data ranks.

    Iterating gives this rank's micro-batches; every rank has the same number of them, filled up with rows
    whose targets are all IGNORE_INDEX.

    Args:
        reader: the token data.
        documents: the validation documents.
        sequence_length: S, tokens in a sample.
        eval_samples: windows at most.
        micro_batch_size: rows of a batch.
        topology: this rank's place.
        vocab_size: ids are below this.
        mask_documents: as in training.
        fixed_documents: as in training.

    Raises:
        UserError: the data is shorter than one window, or S does not split over the sequence ranks.
    """

    def __init__(
        self,
        reader: TokenReader,
        *,
        documents: range,
        sequence_length: int,
        eval_samples: int,
        micro_batch_size: int,
        topology: Topology,
        vocab_size: int,
        mask_documents: bool = True,
        fixed_documents: bool = False,
    ) -> None:
        self._windows = Windows(reader, documents, sequence_length=sequence_length, vocab_size=vocab_size)
        self._micro_batch_size = micro_batch_size
        self._topology = topology
        self._packing = Packing(mask_documents, fixed_documents, _sequence_part(topology, sequence_length))
        self.num_samples = min(eval_samples, len(self._windows))

    def __len__(self) -> int:
        """Micro-batches of each rank."""
        return -(-self.num_samples // (self._micro_batch_size * self._topology.data_parallel_size))

    def __iter__(self) -> Iterator[Batch]:
        """The micro-batches of this rank, in order."""
        topology, rows = self._topology, np.arange(self._micro_batch_size)
        for number in range(len(self)):
            start = (number * topology.data_parallel_size + topology.data_rank) * self._micro_batch_size
            windows = np.where(start + rows < self.num_samples, self._window(start + rows), PADDING)
            yield make_batch(self._windows.read(windows), self._packing)

    def _window(self, samples: NDArray[np.int64]) -> NDArray[np.int64]:
        """Window number of each sample number."""
        return samples * len(self._windows) // self.num_samples

    def target_bytes(self, byte_lengths: NDArray[np.integer[Any]]) -> int:
        """Bytes of text in the targets of the whole set (all ranks'), for bits per byte.

        Args:
            byte_lengths: int [V], bytes of text that each token stands for (`tokenizer.token_byte_lengths`).
        """
        table = np.zeros(max(len(byte_lengths), self._windows.vocab_size), np.int64)
        table[: len(byte_lengths)] = byte_lengths
        whole_rows = replace(self._packing, part=slice(None))
        total = 0
        for window in self._window(np.arange(self.num_samples)):
            targets = make_batch(self._windows.read(np.array([window])), whole_rows).targets.numpy()
            total += int(table[targets[targets != IGNORE_INDEX]].sum())
        return total
