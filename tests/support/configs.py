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

PINNED = (
    "model.hidden_size=256",
    "model.num_attention_heads=8",
    "model.num_hidden_layers=4",
    "model.vocab_size=4096",
    "data.sequence_length=256",
    "schedule.warmup_steps=12",
    "train.steps=120",
)
"""`--set` arguments over the default recipe, for tests that count: the recipe itself may be tuned."""


def write_config(folder: Path, text: str, name: str = "train.yaml") -> Path:
    """Write a config file."""
    path = folder / name
    path.write_text(text)
    return path
