"""What a model is made of: the `model:` section, with Hugging Face's names for the architecture.

One frozen class for every family; `FAMILY_OPTIONS` says which options a family knows and what
they are by default. `resolve` fills the defaults, so that behind `config.load` no field that a
family uses is None.
"""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field


class Section(BaseModel):
    """Base of every section: frozen, and a key that does not exist is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=(), allow_inf_nan=False)


def _written_out(path: object) -> object:
    if path == "":
        raise ValueError("must be a path, not empty")
    if isinstance(path, str) and path.startswith("~"):
        raise ValueError(f"~ means nothing here, it would be a folder of that name; write the path out, not {path}")
    return path


FilePath = Annotated[Path, BeforeValidator(_written_out)]
"""A path as it is: relative ones count from the current directory."""


class RopeScaling(Section):
    """How rotary frequencies are stretched beyond the pretrained length (Hugging Face's `rope_scaling`)."""

    rope_type: Literal["linear", "llama3"] = Field(description="linear: positions / factor; llama3: Llama 3.1's rule")
    factor: float = Field(gt=0, description="how many times longer the context is")
    low_freq_factor: float = Field(default=1.0, gt=0, description="llama3 only")
    high_freq_factor: float = Field(default=4.0, gt=0, description="llama3 only")
    original_max_position_embeddings: int = Field(default=8192, gt=0, description="llama3 only: the pretrained length")


class ModelConfig(Section):
    """A model: its family and architecture, or the Hugging Face folder that both are read from."""

    family: Literal["llama", "neox"] | None = Field(
        default=None, description="architecture; read from pretrained when that is given"
    )
    pretrained: FilePath | None = Field(
        default=None,
        description="Hugging Face folder (config.json and safetensors): architecture and weights come from it",
    )
    vocab_size: int | None = Field(
        default=None, gt=0, description="tokens in the vocabulary; by default the tokenizer's"
    )
    pad_vocab_to_multiple_of: int = Field(
        default=1, ge=1, description="pad the embedding and head in training; the rows are cut off at export"
    )
    hidden_size: int | None = Field(default=None, gt=0, description="width of the residual stream")
    intermediate_size: int | None = Field(
        default=None, gt=0, description="width of the MLP; llama: 8/3 hidden rounded up to 256, neox: 4 hidden"
    )
    num_hidden_layers: int | None = Field(default=None, gt=0, description="number of blocks")
    num_attention_heads: int | None = Field(default=None, gt=0, description="query heads")
    num_key_value_heads: int | None = Field(
        default=None, gt=0, description="llama: key and value heads (GQA); by default as many as query heads"
    )
    head_dim: int | None = Field(
        default=None, gt=0, description="llama: width of a head; by default hidden_size / heads"
    )
    max_position_embeddings: int | None = Field(
        default=None, gt=0, description="longest context written into config.json; by default data.sequence_length"
    )
    rms_norm_eps: float | None = Field(default=None, gt=0, description="llama: epsilon of RMSNorm (1e-5)")
    layer_norm_eps: float | None = Field(default=None, gt=0, description="neox: epsilon of LayerNorm (1e-5)")
    rope_theta: float | None = Field(default=None, gt=0, description="base of the rotary frequencies (10000)")
    rope_scaling: RopeScaling | None = Field(default=None, description="stretch the rotary frequencies")
    rotary_pct: float | None = Field(
        default=None, gt=0, le=1, description="neox: share of a head that is rotated (0.25)"
    )
    use_parallel_residual: bool | None = Field(
        default=None, description="neox: attention and MLP read the same input (true)"
    )
    attention_bias: bool | None = Field(
        default=None, description="bias on the attention projections; llama false, neox true"
    )
    mlp_bias: bool | None = Field(default=None, description="llama: bias on the MLP projections (false)")
    hidden_act: Literal["silu", "gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh"] | None = Field(
        default=None, description="llama: silu; neox: gelu"
    )
    tie_word_embeddings: bool | None = Field(default=None, description="head shares the embedding's weight (false)")
    initializer_range: float | None = Field(
        default=None, gt=0, description="std of the initial weights where the family's rule uses one (0.02)"
    )

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding and head in training: vocab_size rounded up to pad_vocab_to_multiple_of."""
        multiple = self.pad_vocab_to_multiple_of
        return -(-(self.vocab_size or 0) // multiple) * multiple


FAMILY_OPTIONS: dict[str, dict[str, Any]] = {
    "llama": {
        "num_key_value_heads": lambda model: model["num_attention_heads"],
        "head_dim": lambda model: model["hidden_size"] // model["num_attention_heads"],
        "intermediate_size": lambda model: -(-8 * model["hidden_size"] // (3 * 256)) * 256,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "attention_bias": False,
        "mlp_bias": False,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "initializer_range": 0.02,
    },
    "neox": {
        "intermediate_size": lambda model: 4 * model["hidden_size"],
        "layer_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "rotary_pct": 0.25,
        "use_parallel_residual": True,
        "attention_bias": True,
        "hidden_act": "gelu",
        "tie_word_embeddings": False,
        "initializer_range": 0.02,
    },
}
"""For each family the options it knows beyond the common ones, with defaults (a function of what is given so far)."""
