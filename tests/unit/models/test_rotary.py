import pytest
import torch

from fmengine.config.model import RopeScaling
from fmengine.models.rotary import Rotary, inverse_frequencies, rotate
from support.models import random_values, tiny_config, tiny_model, tokens, whole_rows

CPU = torch.device("cpu")


def test_rotation_is_by_position_times_frequency_in_pairs_of_the_two_halves() -> None:
    q = torch.randn(1, 3, 2, 8, dtype=torch.float32)
    position_ids = torch.tensor([[0, 5, 1000]])
    rotated, _ = Rotary(4, 100.0)(q, q, position_ids)
    assert torch.equal(rotated[..., 4:], q[..., 4:])
    assert torch.equal(rotated[:, 0], q[:, 0])
    for step, position in enumerate([0, 5, 1000]):
        for pair, frequency in enumerate([1.0, 0.1]):
            before = torch.complex(q[0, step, :, pair], q[0, step, :, pair + 2])
            after = torch.complex(rotated[0, step, :, pair], rotated[0, step, :, pair + 2])
            turn = torch.polar(torch.tensor(1.0), torch.tensor(position * frequency))
            torch.testing.assert_close(after, before * turn, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("theta", [1e4, 5e5])
def test_llama3_keeps_short_waves_and_divides_long_ones(theta: float) -> None:
    scaling = RopeScaling(rope_type="llama3", factor=8.0)
    plain = inverse_frequencies(Rotary(128, theta), CPU)
    scaled = inverse_frequencies(Rotary(128, theta, scaling), CPU)
    waves = 2 * torch.pi / plain
    short, long = waves < 8192 / 4, waves > 8192
    assert torch.equal(scaled[short], plain[short])
    assert torch.equal(scaled[long], plain[long] / 8)
    ratio = (plain / scaled)[~short & ~long]
    assert ((ratio > 1) & (ratio < 8)).all()
    assert (ratio.diff() > 0).all()


def test_linear_divides_every_frequency() -> None:
    scaling = RopeScaling(rope_type="linear", factor=4.0)
    plain = inverse_frequencies(Rotary(16, 1e4), CPU)
    assert torch.equal(inverse_frequencies(Rotary(16, 1e4, scaling), CPU), plain / 4)


@pytest.mark.parametrize("family", ["llama", "neox"])
def test_tables_stay_float32_in_a_bf16_model(family: str) -> None:
    model = tiny_model(tiny_config(family))
    random_values(model, seed=0)
    model.bfloat16()
    seen = []

    def spy(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
        seen.append(q)
        return q

    attn = model.layers[0].attn
    attn.attention = spy
    position_ids = torch.arange(3001, 3017)[None]
    hidden = torch.randn(1, 16, 32, dtype=torch.bfloat16)
    attn(hidden, position_ids, whole_rows(1, 16)[1])
    q, _, _ = attn.split_heads(attn.qkv(hidden))
    angles = (position_ids[..., None].float() * inverse_frequencies(attn.rotary, CPU)).unsqueeze(2)
    assert torch.equal(seen[0], rotate(q.float(), angles.cos(), angles.sin()).bfloat16())
    assert inverse_frequencies(attn.rotary, CPU).dtype == torch.float32


def test_positions_not_places_turn_the_heads() -> None:
    model = tiny_model(tiny_config("llama"))
    random_values(model, seed=0)
    input_ids = tokens(1, 8)
    position_ids, cu_seqlens = whole_rows(1, 8)
    shifted = model(input_ids, position_ids + 100, cu_seqlens)
    torch.testing.assert_close(shifted, model(input_ids, position_ids, cu_seqlens), rtol=1e-4, atol=1e-4)
    stretched = model(input_ids, position_ids * 2, cu_seqlens)
    assert (stretched - shifted).abs().max() > 1e-2
