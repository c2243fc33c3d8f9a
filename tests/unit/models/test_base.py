import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fmengine.batch import IGNORE_INDEX
from fmengine.kernels.attention import dense_attention
from fmengine.models.base import CausalLM, Stage, without_padding
from fmengine.models.registry import FAMILIES, stages
from support.models import packed, random_values, tiny_config, tiny_model, tokens

FAMILY_NAMES = ["llama", "neox"]
LENGTHS = [[7, 9], [3, 12, 1]]


def filled(config: Any, **options: Any) -> CausalLM:
    model = tiny_model(config, **options)
    random_values(model, seed=3)
    return model


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_each_document_gets_the_logits_it_gets_alone(family: str) -> None:
    model = filled(tiny_config(family))
    input_ids = tokens(2, 16)
    logits = model(input_ids, *packed(LENGTHS))
    alone = model(input_ids[1:, 3:15], *packed([[12]]))
    torch.testing.assert_close(logits[1:, 3:15], alone, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_perturbing_a_document_changes_no_logit_of_another(family: str) -> None:
    model = filled(tiny_config(family))
    input_ids = tokens(2, 16)
    other = input_ids.clone()
    other[1, 3:15] = (other[1, 3:15] + 1) % 61
    layout = packed(LENGTHS)
    before, after = model(input_ids, *layout), model(other, *layout)
    assert torch.equal(before[0], after[0])
    assert torch.equal(before[1, :3], after[1, :3])
    assert torch.equal(before[1, 15:], after[1, 15:])
    assert (before[1, 3:15] != after[1, 3:15]).any(dim=-1).all()


def test_without_document_masking_a_row_attends_across_documents() -> None:
    model = filled(tiny_config("llama"), mask_documents=False)
    input_ids = tokens(1, 16)
    other = input_ids.clone()
    other[0, 0] = (other[0, 0] + 1) % 61
    layout = packed([[7, 9]])
    assert (model(input_ids, *layout)[0, 7:] != model(other, *layout)[0, 7:]).any(dim=-1).all()


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_activation_checkpointing_changes_nothing_but_memory(family: str) -> None:
    config = tiny_config(family)
    plain = filled(config)
    recomputed = filled(config, activation_checkpointing=True)
    inputs = (tokens(2, 16), *packed(LENGTHS), tokens(2, 16, seed=1))
    losses, kept = [], []
    for model in (plain, recomputed):
        saved: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x, s=saved: (s.append(x.numel()), x)[1], lambda x: x):
            loss = model(*inputs)
        loss.backward()
        losses.append(loss)
        kept.append(sum(saved))
    assert torch.equal(losses[0], losses[1])
    assert kept[1] < kept[0] / 4
    ours = gradients(recomputed)
    for name, gradient in gradients(plain).items():
        assert torch.equal(gradient, ours[name]), name


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_padding_takes_no_part(family: str, tied: bool) -> None:
    config = tiny_config(family, tie_word_embeddings=tied)
    plain = filled(config)
    padded = tiny_model(config.model_copy(update={"pad_vocab_to_multiple_of": 64}))
    with torch.no_grad():
        values = dict(plain.named_parameters())
        for name, parameter in padded.named_parameters():
            rows = values[name].shape[0]
            parameter[:rows].copy_(values[name])
            parameter[rows:] = 5.0
    inputs = (tokens(2, 16), *packed(LENGTHS))
    targets = tokens(2, 16, seed=1)
    assert torch.equal(plain(*inputs), padded(*inputs))
    for model in (plain, padded):
        model(*inputs, targets).backward()
    for name, gradient in gradients(padded).items():
        rows = values[name].shape[0]
        torch.testing.assert_close(gradient[:rows], gradients(plain)[name])
        assert torch.count_nonzero(gradient[rows:]) == 0


class ShardOfHead(nn.Linear):
    """A head as AutoTP's vocabulary-parallel one presents itself."""

    vocab_start_index = 40


def test_padding_of_a_vocabulary_parallel_head_is_minus_infinity() -> None:
    logits = torch.randn(2, 3, 24)
    masked = without_padding(logits, ShardOfHead(8, 24), vocab_size=61)
    assert torch.equal(masked[..., :21], logits[..., :21])
    assert (masked[..., 21:] == -torch.inf).all()
    assert torch.equal(without_padding(logits, ShardOfHead(8, 24), vocab_size=64), logits)


def test_the_loss_sums_over_targets_in_float32() -> None:
    model = filled(tiny_config("llama")).bfloat16()
    inputs, targets = (tokens(2, 16), *packed(LENGTHS)), tokens(2, 16, seed=1)
    targets[0, 2:] = IGNORE_INDEX
    log_p = model(*inputs).detach().double().log_softmax(-1)
    expected = -sum(log_p[i, j, targets[i, j]] for i in range(2) for j in range(16) if targets[i, j] != IGNORE_INDEX)
    loss = model(*inputs, targets)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(float(expected), rel=1e-6)


def test_the_loss_function_can_be_replaced() -> None:
    model = filled(tiny_config("llama"))
    model.loss_function = lambda logits, *, shift_labels, num_items_in_batch: logits.sum() * num_items_in_batch
    inputs = (tokens(1, 8), *packed([[8]]))
    assert torch.equal(model(*inputs, tokens(1, 8)), model(*inputs).sum())


@pytest.mark.parametrize("targets_travel", [True, False])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_stages_are_the_flat_model(family: str, tied: bool, targets_travel: bool) -> None:
    config = tiny_config(family, tie_word_embeddings=tied, pad_vocab_to_multiple_of=16)
    flat = filled(config)
    values = dict(flat.named_parameters())
    layers: list[Stage] = [build() for build in stages(config, attention=dense_attention(mask_documents=True))]
    names: list[str] = []
    for layer in layers:
        for name, parameter in layer.named_parameters():
            names.append(name)
            parameter.data.copy_(values[name])
    assert sorted(set(names)) == sorted(values)
    assert len(names) == len(values) + tied
    position_ids, cu_seqlens = packed(LENGTHS)
    input_ids, targets = tokens(2, 16), tokens(2, 16, seed=1)
    x: Any = (input_ids, targets, position_ids, cu_seqlens) if targets_travel else (input_ids, position_ids, cu_seqlens)
    for layer in layers:
        x = layer(x)
    flat_inputs = (input_ids, position_ids, cu_seqlens, *([targets] if targets_travel else []))
    assert torch.equal(x, flat(*flat_inputs))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_names_and_shapes_are_those_the_family_tells(family: str, tied: bool) -> None:
    config = tiny_config(family, tie_word_embeddings=tied, pad_vocab_to_multiple_of=16)
    model = tiny_model(config)
    expected = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    shapes = FAMILIES[family].parameter_shapes(config)
    assert shapes == expected
    assert list(shapes) == list(expected)
    assert ("lm_head.weight" in shapes) != tied


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_what_deepspeed_needs(family: str) -> None:
    model = tiny_model(tiny_config(family))
    assert model.config.num_key_value_heads == 4
    assert isinstance(model.lm_head, nn.Linear)
    assert not list(model.buffers())
    copy.deepcopy(model)


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_the_forward_pass_reads_nothing_back_from_the_device(family: str) -> None:
    with torch.device("meta"):
        model = tiny_model(tiny_config(family, pad_vocab_to_multiple_of=16), activation_checkpointing=True)
    inputs = [x.to("meta") for x in (tokens(2, 16), *packed(LENGTHS), tokens(2, 16))]
    model(*inputs).backward()


@pytest.mark.parametrize("activation_checkpointing", [False, True])
@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_a_block_compiles_to_one_graph(family: str, activation_checkpointing: bool) -> None:
    model = filled(tiny_config(family), activation_checkpointing=activation_checkpointing)
    inputs = (tokens(2, 16), *packed(LENGTHS))
    expected = model(*inputs)
    for block in model.layers:
        block.forward = torch.compile(block.forward, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(model(*inputs), expected, rtol=1e-5, atol=1e-5)
