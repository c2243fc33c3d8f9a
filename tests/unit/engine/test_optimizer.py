"""The optimizer's groups: the family's rule, every parameter exactly once."""

from typing import Any

import pytest
import torch
from torch import nn

from fmengine.config.schema import OptimizerConfig
from fmengine.engine.optimizer import build_optimizer
from fmengine.models.registry import family_of
from support.models import tiny_config, tiny_model

CONFIG = OptimizerConfig(learning_rate=0.01, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.3)
DECAYED = {
    "llama": {"attn.qkv.weight", "attn.out.weight", "mlp.gate_up.weight", "mlp.down.weight"},
    "neox": {"attn.qkv.weight", "attn.out.weight", "mlp.up.weight", "mlp.down.weight"},
}
"""Of a layer, written out."""
OPTIONS: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("llama", {"tie_word_embeddings": True}),
    ("llama", {"attention_bias": True, "mlp_bias": True}),
    ("neox", {}),
    ("neox", {"tie_word_embeddings": True, "attention_bias": False}),
]


@pytest.mark.parametrize(("family", "options"), OPTIONS)
def test_matrices_decay_and_every_parameter_is_there_once(family: str, options: dict[str, Any]) -> None:
    config = tiny_config(family, **options)
    model = tiny_model(config)
    named = dict(model.named_parameters())
    optimizer = build_optimizer(named.items(), CONFIG, family_of(config).decays)
    names = {id(parameter): name for name, parameter in named.items()}
    found = {
        group["weight_decay"]: [names[id(parameter)] for parameter in group["params"]]
        for group in optimizer.param_groups
    }
    expected = {f"layers.{layer}.{name}" for layer in range(2) for name in DECAYED[family]}
    if not options.get("tie_word_embeddings"):
        expected.add("lm_head.weight")
    assert set(found) == {0.3, 0.0}
    assert set(found[0.3]) == expected
    assert set(found[0.0]) == named.keys() - expected
    assert len(found[0.3]) + len(found[0.0]) == len(named)
    assert "embed.weight" in found[0.0]
    assert ("lm_head.weight" in named) != bool(options.get("tie_word_embeddings"))


def test_hyper_parameters() -> None:
    weight = nn.Parameter(torch.ones(2, 2))
    optimizer = build_optimizer([("layers.0.mlp.down.weight", weight)], CONFIG, lambda _: True)
    (group,) = optimizer.param_groups  # an empty group would be an error in DeepSpeed
    assert (group["lr"], group["betas"], group["eps"], group["weight_decay"]) == (0.01, (0.8, 0.9), 1e-6, 0.3)


def test_the_decay_is_decoupled() -> None:
    """Without a gradient AdamW shrinks a decayed weight by learning rate x decay, and leaves the other alone."""
    decayed, plain = (nn.Parameter(torch.ones(2)) for _ in range(2))
    optimizer = build_optimizer([("a", decayed), ("b", plain)], CONFIG, lambda name: name == "a")
    decayed.grad, plain.grad = torch.zeros(2), torch.zeros(2)
    optimizer.step()
    assert decayed.tolist() == pytest.approx([1 - 0.01 * 0.3] * 2)
    assert plain.tolist() == [1.0, 1.0]
