"""Our models against Transformers' with the same weights: logits and every gradient, for each option."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from fmengine.batch import IGNORE_INDEX
from fmengine.models.hf import to_hf
from support.models import (
    difference,
    hf_values,
    packed,
    same_weights,
    tiny_config,
    tiny_model,
    tokens,
    transformers_model,
    whole_rows,
)

TOLERANCE = 1e-5
LENGTH = 48
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR = {"rope_type": "linear", "factor": 4.0}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-gqa": ("llama", {"num_key_value_heads": 2}),
    "llama-mqa": ("llama", {"num_key_value_heads": 1}),
    "llama-head-dim": ("llama", {"head_dim": 16, "num_key_value_heads": 2}),
    "llama-llama3-rope": ("llama", {"head_dim": 16, "rope_scaling": LLAMA3, "rope_theta": 1000.0}),
    "llama-linear-rope": ("llama", {"rope_scaling": LINEAR}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-attention-bias": ("llama", {"attention_bias": True, "num_key_value_heads": 2}),
    "llama-mlp-bias": ("llama", {"mlp_bias": True}),
    "llama-gelu": ("llama", {"hidden_act": "gelu_pytorch_tanh"}),
    "llama-epsilon": ("llama", {"rms_norm_eps": 0.1}),
    "llama-padded-vocabulary": ("llama", {"pad_vocab_to_multiple_of": 16}),
    "llama-padded-tied": ("llama", {"pad_vocab_to_multiple_of": 16, "tie_word_embeddings": True}),
    "neox": ("neox", {}),
    "neox-half-rotary": ("neox", {"rotary_pct": 0.5}),
    "neox-full-rotary": ("neox", {"rotary_pct": 1.0}),
    "neox-sequential": ("neox", {"use_parallel_residual": False}),
    "neox-no-attention-bias": ("neox", {"attention_bias": False}),
    "neox-tied": ("neox", {"tie_word_embeddings": True}),
    "neox-gelu-new": ("neox", {"hidden_act": "gelu_new"}),
    "neox-gelu-fast": ("neox", {"hidden_act": "gelu_fast"}),
    "neox-gelu-tanh": ("neox", {"hidden_act": "gelu_pytorch_tanh"}),
    "neox-theta": ("neox", {"rope_theta": 100.0, "rotary_pct": 1.0}),
    "neox-linear-rope": ("neox", {"rope_scaling": LINEAR, "rotary_pct": 1.0}),
    "neox-llama3-rope": ("neox", {"rope_scaling": LLAMA3, "rotary_pct": 1.0, "rope_theta": 1000.0}),
    "neox-epsilon": ("neox", {"layer_norm_eps": 0.1}),
    "neox-padded-vocabulary": ("neox", {"pad_vocab_to_multiple_of": 16}),
}


@pytest.mark.parametrize("case", CASES)
def test_logits_and_every_gradient_equal_transformers(case: str) -> None:
    family, options = CASES[case]
    config = tiny_config(family, **options)
    theirs = transformers_model(config)
    ours = same_weights(tiny_model(config), theirs)
    input_ids, targets = tokens(2, LENGTH), tokens(2, LENGTH, seed=1)
    targets[0, :7] = IGNORE_INDEX
    position_ids, cu_seqlens = whole_rows(2, LENGTH)

    their_logits = theirs(input_ids=input_ids, use_cache=False).logits
    assert difference(ours(input_ids, position_ids, cu_seqlens), their_logits) < TOLERANCE

    their_loss = F.cross_entropy(their_logits.flatten(0, 1), targets.flatten(), reduction="sum")
    their_loss.backward()
    loss = ours(input_ids, position_ids, cu_seqlens, targets)
    loss.backward()
    assert abs(loss.item() - their_loss.item()) < TOLERANCE * their_loss.item()

    their_gradients = hf_values(theirs, gradients=True)
    for name, parameter in ours.named_parameters():
        for hf_name, gradient in to_hf(config, name, parameter.grad).items():
            assert difference(gradient, their_gradients.pop(hf_name)) < TOLERANCE, hf_name
    assert not their_gradients


@pytest.mark.parametrize("family", ["llama", "neox"])
def test_packed_documents_equal_transformers_on_each_alone(family: str) -> None:
    config = tiny_config(family)
    theirs = transformers_model(config)
    ours = same_weights(tiny_model(config), theirs)
    lengths = [[5, 1, 18], [24]]
    input_ids = tokens(2, 24)
    logits = ours(input_ids, *packed(lengths))
    for row, documents in enumerate(lengths):
        ends = torch.tensor(documents).cumsum(0).tolist()
        for start, end in zip([0, *ends], ends, strict=False):
            alone = theirs(input_ids=input_ids[row : row + 1, start:end], use_cache=False).logits
            assert difference(logits[row : row + 1, start:end], alone) < TOLERANCE
