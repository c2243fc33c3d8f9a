"""Small token data sets and tokenizers for tests."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fmengine.data.tokens import TokenReader, TokenWriter


def write_documents(prefix: Path, documents: Sequence[Sequence[int]], vocab_size: int = 1000) -> TokenReader:
    """Write documents to PREFIX.bin/.idx and open them."""
    with TokenWriter(prefix, vocab_size, overwrite=True) as writer:
        for document in documents:
            writer.append(np.array(document, np.int64), np.array([len(document)]))
        writer.finish()
    return TokenReader(prefix)
