"""The two engines around DeepSpeed: data parallel (ZeRO, tensor, sequence) and pipeline."""
