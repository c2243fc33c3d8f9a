"""FMEngine: train LLaMA and GPT-NeoX models with DeepSpeed on supercomputers."""

__version__ = "0.1.0"
