from pathlib import Path

import pytest
from tokenizers import Tokenizer

from fmengine.data.tokenizer import save_tokenizer, train_bpe

WORDS = "the quick brown fox jumps over the lazy dog and the naïve café owner says 'über' to 東京 "


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    """A byte-level BPE of 300 tokens."""
    return train_bpe([WORDS * 20], 300)


@pytest.fixture(scope="session")
def tokenizer_dir(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(tokenizer, folder, "<|endoftext|>")
    return folder
