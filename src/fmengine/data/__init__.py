"""From text to tokens on disk to batches; every sample is a pure function of its number."""
