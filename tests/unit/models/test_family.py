import pytest

from fmengine.models.names import ParameterName
from fmengine.models.registry import FAMILIES
from support.models import tiny_config


@pytest.mark.parametrize("family", ["llama", "neox"])
def test_matrices_decay_and_nothing_else(family: str) -> None:
    shapes = FAMILIES[family].parameter_shapes(tiny_config(family, attention_bias=True))
    decayed = {name for name in shapes if FAMILIES[family].decays(name)}
    assert decayed == {name for name, shape in shapes.items() if len(shape) == 2} - {"embed.weight"}
    assert "lm_head.weight" in decayed


def test_flops_by_hand() -> None:
    config = tiny_config("llama", num_key_value_heads=2, head_dim=16, pad_vocab_to_multiple_of=64)
    attention = 32 * (4 + 2 + 2) * 16 + 4 * 16 * 32
    parameters = 2 * (attention + 3 * 32 * 48 + 2 * 32) + 32 + 61 * 32
    assert FAMILIES["llama"].flops_per_token(config, 100) == 6 * parameters + 12 * 2 * 4 * 16 * 100


def test_flops_of_a_tied_head_count_its_matrix() -> None:
    flops = [FAMILIES["neox"].flops_per_token(tiny_config("neox", tie_word_embeddings=t), 8) for t in (True, False)]
    assert flops[0] == flops[1]


def test_flops_of_the_measured_llama_1b() -> None:
    config = tiny_config(
        "llama",
        vocab_size=32000,
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=22,
        num_attention_heads=32,
        num_key_value_heads=4,
    )
    # 64,650 tokens/s were measured as 47.8 % of 989 TFLOP/s
    assert FAMILIES["llama"].flops_per_token(config, 2048) * 64650 / 989e12 == pytest.approx(0.478, abs=0.0006)


def test_a_name_is_taken_apart() -> None:
    name = ParameterName.parse("layers.12.attn.qkv.bias")
    assert (name.module, name.layer, name.leaf) == ("attn.qkv", 12, "bias")
    assert ParameterName.parse("layers.0.mlp_norm.weight").is_norm
    assert ParameterName.parse("norm.bias").is_norm
    assert ParameterName.parse("embed.weight").is_vocabulary
    assert ParameterName.parse("lm_head.weight").is_vocabulary
    assert not ParameterName.parse("layers.0.mlp.down.weight").is_norm
