"""Two ranks that share a sequence attend as one does."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fmengine.errors import UserError
from fmengine.kernels.attention import dense_attention
from fmengine.kernels.ulysses import ulysses_attention
from fmengine.models.registry import build
from support.distributed import WorkerPool
from support.models import packed, random_values, tiny_config, tokens

LENGTHS = [[5, 11], [13, 3]]


def whole(kv_heads: int) -> tuple[list[Tensor], Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, 16, heads, 8) for heads in (4, kv_heads, kv_heads)]
    tensors = [torch.randn(shape, generator=generator) for shape in shapes]
    return tensors, torch.randn(2, 16, 4, 8, generator=generator), packed(LENGTHS)[1]


def attend(kv_heads: int) -> list[Tensor]:
    """Slices, of this rank, of the output and of the gradients of q, k and v."""
    rank, size = dist.get_rank(), dist.get_world_size()
    tensors, weights, cu_seqlens = whole(kv_heads)
    q, k, v = (x.chunk(size, dim=1)[rank].clone().requires_grad_() for x in tensors)
    attention = ulysses_attention(
        dense_attention(mask_documents=True),
        dist.group.WORLD,
        num_attention_heads=4,
        num_key_value_heads=kv_heads,
    )
    out = attention(q, k, v, cu_seqlens)
    (out * weights.chunk(size, dim=1)[rank]).sum().backward()
    return [out.detach(), q.grad, k.grad, v.grad]


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_attention_and_gradients_equal_one_process(workers: Callable[..., WorkerPool], kv_heads: int) -> None:
    tensors, weights, cu_seqlens = whole(kv_heads)
    q, k, v = (x.requires_grad_() for x in tensors)
    out = dense_attention(mask_documents=True)(q, k, v, cu_seqlens)
    (out * weights).sum().backward()
    slices = workers(2).run(attend, kv_heads)
    for index, expected in enumerate([out.detach(), q.grad, k.grad, v.grad]):
        got = torch.cat([piece[index] for piece in slices], dim=1)
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)


def refusals() -> list[str]:
    messages = []
    for heads, kv_heads in [(3, 3), (6, 3)]:
        try:
            ulysses_attention(
                dense_attention(mask_documents=True),
                dist.group.WORLD,
                num_attention_heads=heads,
                num_key_value_heads=kv_heads,
            )
        except UserError as error:
            messages.append(str(error))
    return messages


def test_heads_that_cannot_be_shared_are_refused(workers: Callable[..., WorkerPool]) -> None:
    first, second = workers(2).run(refusals)[0]
    assert "2 does not divide the 3 attention heads" in first
    assert "2 neither divides the 3 key-value heads" in second


def loss_of_a_slice(family: str, kv_heads: int | None) -> tuple[float, dict[str, Tensor]]:
    """Part of the loss on this rank, and the gradients summed over ranks."""
    rank, size = dist.get_rank(), dist.get_world_size()
    config = tiny_config(family, **({"num_key_value_heads": kv_heads} if kv_heads else {}))
    attention = dense_attention(mask_documents=True)
    if size > 1:
        attention = ulysses_attention(
            attention, dist.group.WORLD, num_attention_heads=4, num_key_value_heads=kv_heads or 4
        )
    model = build(config, attention=attention, activation_checkpointing=True)
    random_values(model, seed=1)
    position_ids, cu_seqlens = packed(LENGTHS)
    input_ids, positions, targets = (
        x.chunk(size, dim=1)[rank] for x in (tokens(2, 16), position_ids, tokens(2, 16, seed=1))
    )
    loss = model(input_ids, positions, cu_seqlens, targets)
    loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    for gradient in gradients.values():
        dist.all_reduce(gradient)
    return loss.item(), gradients


@pytest.mark.parametrize(("family", "kv_heads"), [("llama", 1), ("neox", None)])
def test_a_model_on_slices_equals_the_model(
    workers: Callable[..., WorkerPool], family: str, kv_heads: int | None
) -> None:
    parts = workers(2).run(loss_of_a_slice, family, kv_heads)
    ((loss, gradients),) = workers(1).run(loss_of_a_slice, family, kv_heads)
    assert sum(part[0] for part in parts) == pytest.approx(loss, rel=1e-5)
    for name, expected in gradients.items():
        torch.testing.assert_close(parts[0][1][name], expected, rtol=1e-4, atol=1e-4)
