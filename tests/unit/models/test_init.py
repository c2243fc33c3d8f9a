import math

import pytest
import torch

from fmengine.models.weights import from_seed
from support.models import tiny_config


@pytest.mark.parametrize("family", ["llama", "neox"])
def test_a_value_depends_on_seed_and_name_alone(family: str) -> None:
    config = tiny_config(family)
    name = "layers.1.attn.qkv.weight"
    first = from_seed(config, 7)
    first("embed.weight")
    value = first(name)
    torch.manual_seed(123)
    assert torch.equal(from_seed(config, 7)(name), value)
    larger = tiny_config(family, num_hidden_layers=5, vocab_size=99, intermediate_size=64)
    assert torch.equal(from_seed(larger, 7)(name), value)
    assert not torch.equal(from_seed(config, 8)(name), value)
    assert not torch.equal(first("layers.0.attn.qkv.weight"), value)


def test_the_values_are_pinned() -> None:
    weight = from_seed(tiny_config("llama"), 7)("layers.1.attn.qkv.weight")
    expected = torch.tensor([[-0.018447446, 0.026615776, -0.0055729318]])
    torch.testing.assert_close(weight[:1, :3], expected, rtol=1e-5, atol=1e-8)


def test_padding_is_zero_and_changes_no_other_row() -> None:
    plain = from_seed(tiny_config("neox"), 1)
    padded = from_seed(tiny_config("neox", pad_vocab_to_multiple_of=64), 1)
    for name in ("embed.weight", "lm_head.weight"):
        assert padded(name).shape == (64, 32)
        assert torch.equal(padded(name)[:61], plain(name))
        assert torch.count_nonzero(padded(name)[61:]) == 0


def test_llama_is_normal_with_initializer_range() -> None:
    source = from_seed(tiny_config("llama", hidden_size=256, initializer_range=0.05, attention_bias=True), 0)
    for name in ("embed.weight", "lm_head.weight", "layers.0.attn.out.weight", "layers.0.mlp.gate_up.weight"):
        assert source(name).std().item() == pytest.approx(0.05, rel=0.03)
        assert abs(source(name).mean().item()) < 0.002
    assert torch.equal(source("layers.0.attn_norm.weight"), torch.ones(256))
    assert torch.count_nonzero(source("layers.0.attn.qkv.bias")) == 0


def test_neox_is_small_init_and_wang_init() -> None:
    source = from_seed(tiny_config("neox", hidden_size=256, num_hidden_layers=3), 0)
    small, wang = math.sqrt(2 / (5 * 256)), 2 / (3 * math.sqrt(256))
    for name in ("embed.weight", "lm_head.weight", "layers.0.attn.qkv.weight", "layers.2.mlp.up.weight"):
        assert source(name).std().item() == pytest.approx(small, rel=0.03)
    for name in ("layers.0.attn.out.weight", "layers.2.mlp.down.weight"):
        assert source(name).std().item() == pytest.approx(wang, rel=0.03)
    for name in ("layers.0.attn_norm.weight", "layers.1.mlp_norm.weight", "norm.weight"):
        assert torch.equal(source(name), torch.ones(256))
    for name in ("layers.0.attn_norm.bias", "layers.0.attn.qkv.bias", "layers.1.mlp.down.bias", "norm.bias"):
        assert torch.count_nonzero(source(name)) == 0
