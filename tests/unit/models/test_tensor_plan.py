from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fmengine.models.registry import FAMILIES
from fmengine.models.tensor_plan import PlanEntry, find_entry, merge_shards, split_shard
from support.models import packed, random_values, tiny_config, tiny_model

CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-gqa": ("llama", {"num_key_value_heads": 2, "attention_bias": True, "mlp_bias": True}),
    "llama-head-dim": ("llama", {"head_dim": 24, "num_key_value_heads": 2}),
    "neox": ("neox", {}),
    "neox-sequential": ("neox", {"use_parallel_residual": False}),
}


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("case", CONFIGS)
def test_merging_undoes_splitting(case: str, world_size: int) -> None:
    family, options = CONFIGS[case]
    config = tiny_config(family, **options)
    plan = FAMILIES[family].tensor_plan(config, vocabulary_parallel=True)
    for name, shape in FAMILIES[family].parameter_shapes(config).items():
        tensor, entry = torch.randn(shape), find_entry(plan, name)
        shards = [split_shard(entry, tensor, rank, world_size) for rank in range(world_size)]
        assert torch.equal(merge_shards(entry, shards), tensor), name
        if entry.kind != "replicated":
            assert sum(shard.numel() for shard in shards) == tensor.numel()


def test_what_is_cut_and_what_is_not() -> None:
    kinds = {}
    for family, tied, vocabulary_parallel in [("llama", False, True), ("neox", True, True), ("neox", False, False)]:
        config = tiny_config(family, tie_word_embeddings=tied)
        plan = FAMILIES[family].tensor_plan(config, vocabulary_parallel=vocabulary_parallel)
        shapes = FAMILIES[family].parameter_shapes(config)
        kinds[family, tied] = {name: find_entry(plan, name).kind for name in shapes}
    llama, tied_neox, neox = kinds["llama", False], kinds["neox", True], kinds["neox", False]
    assert llama["layers.1.attn.qkv.weight"] == llama["layers.1.mlp.gate_up.weight"] == "column"
    assert llama["layers.1.attn.out.weight"] == llama["layers.1.mlp.down.weight"] == "row"
    assert neox["layers.0.attn.qkv.bias"] == neox["layers.0.mlp.up.bias"] == "column"
    assert neox["layers.0.attn.out.bias"] == neox["layers.0.mlp.down.bias"] == "replicated"
    assert llama["layers.0.attn_norm.weight"] == llama["norm.weight"] == "replicated"
    assert (llama["lm_head.weight"], llama["embed.weight"]) == ("column", "replicated")
    assert tied_neox["embed.weight"] == "column"
    assert neox["lm_head.weight"] == neox["embed.weight"] == "replicated"


def test_every_sub_parameter_is_cut_by_itself() -> None:
    entry = PlanEntry("x", "column", (4, 2, 2))
    tensor = torch.arange(8)[:, None]
    assert split_shard(entry, tensor, 0, 2).flatten().tolist() == [0, 1, 4, 6]
    assert split_shard(entry, tensor, 1, 2).flatten().tolist() == [2, 3, 5, 7]


class Row(nn.Linear):
    """A row-parallel layer as AutoTP makes it: the bias is added once, after the sum over ranks."""

    def forward(self, input: Tensor) -> Tensor:
        return nn.functional.linear(input, self.weight)


@pytest.mark.parametrize("case", CONFIGS)
def test_a_blocks_shards_sum_to_the_block(case: str) -> None:
    family, options = CONFIGS[case]
    config = tiny_config(family, **options)
    plan = FAMILIES[family].tensor_plan(config, vocabulary_parallel=True)
    model = tiny_model(config)
    random_values(model, seed=5)
    block = model.layers[0]
    hidden, (position_ids, cu_seqlens) = torch.randn(2, 16, 32), packed([[7, 9], [16]])
    for part in ("attn", "mlp"):
        inputs = (hidden, position_ids, cu_seqlens) if part == "attn" else (hidden,)
        whole = getattr(block, part)(*inputs)
        pieces = []
        for rank in range(2):
            shard = getattr(tiny_model(config).layers[0], part)
            for name, linear in list(shard.named_children()):
                values = dict(getattr(getattr(block, part), name).named_parameters())
                cut = {}
                for leaf, value in values.items():
                    entry = find_entry(plan, f"layers.0.{part}.{name}.{leaf}")
                    cut[leaf] = split_shard(entry, value.detach(), rank, 2)
                kind = Row if isinstance(linear, nn.Linear) and name in ("out", "down") else nn.Linear
                rows, columns = cut["weight"].shape
                replacement = kind(columns, rows, bias="bias" in cut)
                replacement.load_state_dict(cut)
                setattr(shard, name, replacement)
            pieces.append(shard(*inputs))
        total = pieces[0] + pieces[1]
        last = getattr(block, part).out if part == "attn" else block.mlp.down
        if last.bias is not None:
            total = total + last.bias
        torch.testing.assert_close(total, whole, rtol=1e-5, atol=1e-5)
