"""Tensor-parallel pieces put together, tied weights, and what is refused. DeepSpeed's own files: tests/distributed."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from fmengine.checkpoint.find import verify
from fmengine.checkpoint.manifest import Layout, complete
from fmengine.checkpoint.reader import StateReader, merge_by_plan, open_state
from fmengine.checkpoint.zero_files import Kind, PartitionedShard, WholeShard
from fmengine.errors import UserError
from fmengine.models.registry import family_of
from fmengine.models.tensor_plan import find_entry, split_shard
from fmengine.models.weights import from_seed
from support.checkpoints import header, save_step
from support.models import tiny_config

LLAMA = tiny_config(
    "llama",
    vocab_size=10,
    pad_vocab_to_multiple_of=4,
    hidden_size=8,
    intermediate_size=12,
    num_hidden_layers=1,
    num_key_value_heads=2,
    max_position_embeddings=16,
    attention_bias=True,
    mlp_bias=True,
)


def whole(weights: dict[str, Tensor]) -> WholeShard:
    state = {i: {"step": 3.0, "exp_avg": w + 1, "exp_avg_sq": w + 2} for i, w in enumerate(weights.values())}
    return WholeShard(weights, {"state": state}, list(weights))


@pytest.mark.parametrize("vocabulary_parallel", [True, False])
def test_tensor_parallel_pieces_by_the_familys_plan(vocabulary_parallel: bool) -> None:
    """The same plan cuts here and merges there; a head that was left whole is taken as it is."""
    source = from_seed(LLAMA, 0)
    full = {name: source(name) for name in family_of(LLAMA).parameter_shapes(LLAMA)}
    plan = family_of(LLAMA).tensor_plan(LLAMA, vocabulary_parallel=vocabulary_parallel)
    shards = [
        whole({f"module.{name}": split_shard(find_entry(plan, name), w, rank, 2).clone() for name, w in full.items()})
        for rank in range(2)
    ]
    saved = header(1, LLAMA).model_copy(
        update={"layout": Layout(world_size=2, tensor=2, zero_stage=0, precision="fp32")}
    )
    canonical = {f"module.{name}": name for name in full}
    reader = StateReader(shards, canonical, 2, merge_by_plan(complete(saved, {})))
    assert reader.names() == list(full)
    assert reader.step == 3
    for name, weight in full.items():
        assert torch.equal(reader.weight(name), weight), name
        assert torch.equal(reader.moments(name)[1], weight + 2), name


def test_a_tied_weight_is_read_from_the_first_stage() -> None:
    first, last = torch.ones(2, 2), torch.ones(2, 2)
    shards = [whole({"0.embed.weight": first}), whole({"2.norm.weight": torch.zeros(2), "2.embed.weight": last})]
    canonical = {"0.embed.weight": "embed.weight", "2.norm.weight": "norm.weight", "2.embed.weight": "embed.weight"}
    reader = StateReader(shards, canonical, 1, lambda name, pieces: pieces[0])
    assert reader.names() == ["embed.weight", "norm.weight"]
    assert torch.equal(reader.weight("embed.weight"), first)


def test_a_missing_partition_is_no_silent_gap() -> None:
    """ZeRO-1 with the second rank's file lost: half a tensor is an error, not a short or zero one."""
    from collections import namedtuple

    address = namedtuple("address", ["numel", "start"])
    partition = {
        "optimizer_state_dict": {
            "single_partition_of_fp32_groups": [torch.arange(3.0)],
            "base_optimizer_state": {"state": {}},
            "param_slice_mappings": [{"w": address(3, 0)}],
        }
    }
    shard = PartitionedShard([{"w": torch.Size([2, 3])}], [partition])
    kind: Kind = "weight"
    with pytest.raises(ValueError, match="w: DeepSpeed's files hold 3 elements of a tensor of shape"):
        shard.read("w", kind)


def test_changed_and_foreign_pickles_are_never_loaded(run: Path) -> None:
    path = save_step(run, 1)
    manifest = verify(path)
    stranger = path / "engine" / "state" / "zero_pp_rank_0_mp_rank_00_optim_states.pt"
    stranger.write_bytes(b"a pickle from elsewhere")
    with pytest.raises(UserError, match="not in the manifest"):
        open_state(path / "engine", manifest)
    stranger.unlink()
    (path / "engine" / "state" / "rank-0.pt").write_bytes(b"x" * 1000)
    with pytest.raises(UserError, match=r"rank-0\.pt: not what was written"):
        open_state(path / "engine", manifest)
