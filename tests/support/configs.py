"""Small configs for tests."""

from pathlib import Path

MODEL = """\
model:
  family: llama
  vocab_size: 512
  hidden_size: 64
  num_hidden_layers: 2
  num_attention_heads: 4
"""


def write_config(folder: Path, text: str, name: str = "train.yaml") -> Path:
    """Write a config file."""
    path = folder / name
    path.write_text(text)
    return path
