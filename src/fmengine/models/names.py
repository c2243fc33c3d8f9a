"""Canonical parameter names, as one small type: "layers.3.attn.qkv.weight" is layer 3, module attn.qkv, leaf weight."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ParameterName:
    """A canonical name taken apart.

    Attributes:
        module: "embed", "norm", "lm_head", or a module's path inside its block ("attn.qkv").
        layer: index of the block, or None.
        leaf: "weight" or "bias".
    """

    module: str
    layer: int | None
    leaf: str

    @classmethod
    def parse(cls, name: str) -> "ParameterName":
        """Take a canonical name apart."""
        path, leaf = name.rsplit(".", 1)
        if path.startswith("layers."):
            _, layer, module = path.split(".", 2)
            return cls(module, int(layer), leaf)
        return cls(path, None, leaf)

    @property
    def is_vocabulary(self) -> bool:
        """Whether its rows are the vocabulary, and so may be padded."""
        return self.module in ("embed", "lm_head")

    @property
    def is_norm(self) -> bool:
        """Whether it belongs to a norm."""
        return self.module in ("attn_norm", "mlp_norm", "norm")
