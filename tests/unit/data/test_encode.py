from pathlib import Path

from tokenizers import Tokenizer

from fmengine.data.blocks import Block
from fmengine.data.encode import Encoder


def test_the_unfinished_line_of_a_damaged_file_is_one_bad_row(tokenizer: Tokenizer) -> None:
    data = b'{"text": "one"}\n\n{"text": "two"}\n{"text": "thr'
    encoded = Encoder(tokenizer, 0, "text")(Block(Path("a.jsonl.gz"), 11, data, False, "truncated", 7))
    assert encoded.bad == ["a.jsonl.gz:14: truncated"]
    assert encoded.lengths.sum() == encoded.tokens.size
    assert len(encoded.lengths) == 2


def test_a_last_line_without_a_newline_is_a_row(tokenizer: Tokenizer) -> None:
    data = '{"text": "one"}\r\n{"text": "é"}'.encode()
    encoded = Encoder(tokenizer, 0, "text")(Block(Path("a.jsonl"), 1, data, False, None, 7))
    assert (encoded.bad, encoded.text_bytes) == ([], 5)
    assert encoded.tokens[-1] == 0
