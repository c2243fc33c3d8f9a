"""Checkpoints: staged, checksummed, completed by an atomic marker; readable at any layout."""
