"""The store gives back what went in, goes on after a kill, and is never half there."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from fmengine.checkpoint.manifest import FormatError
from fmengine.checkpoint.store import ParameterStore, write_store
from fmengine.errors import UserError
from support.checkpoints import Faults, Killed


class MemoryState:
    """Three parameters; counts what is read of it."""

    step = 7

    def __init__(self, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        shapes = {"embed.weight": (5, 3), "layers.0.attn.qkv.weight": (4, 3), "norm.weight": (3,)}
        self.tensors = {name: torch.randn(3, *shape, generator=generator) for name, shape in shapes.items()}
        self.read: list[str] = []

    def names(self) -> list[str]:
        return list(self.tensors)

    def weight(self, name: str) -> Tensor:
        self.read.append(name)
        return self.tensors[name][0]

    def moments(self, name: str) -> tuple[Tensor, Tensor]:
        return self.tensors[name][1], self.tensors[name][2]


def assert_same(store: ParameterStore, state: MemoryState) -> None:
    assert store.step == 7
    assert sorted(store.names()) == sorted(state.tensors)
    for name, tensors in state.tensors.items():
        assert store.shape(name) == tuple(tensors[0].shape)
        for ours, theirs in zip((store.weight(name), *store.moments(name)), tensors, strict=True):
            assert torch.equal(ours, theirs)


def test_round_trip_and_parts(tmp_path: Path) -> None:
    state = MemoryState()
    write_store(state, "a", tmp_path / "store")
    assert [path.name for path in tmp_path.iterdir()] == ["store"]
    store = ParameterStore(tmp_path / "store")
    assert_same(store, state)
    part = store.part("embed.weight", "exp_avg", (slice(1, 4), slice(0, 2)))
    assert torch.equal(part, state.tensors["embed.weight"][1][1:4, 0:2])


def test_killed_at_every_operation_and_gone_on_with(tmp_path: Path) -> None:
    skipped = 0
    for fail_at in range(100):
        out = tmp_path / str(fail_at) / "store"
        out.parent.mkdir()
        with pytest.MonkeyPatch.context() as patch:
            faults = Faults(patch, fail_at, Killed())
            try:
                write_store(MemoryState(), "a", out)
            except Killed:
                pass
            else:
                assert faults.count <= fail_at
                break
        state = MemoryState()
        if out.exists():
            assert_same(ParameterStore(out), state)
        write_store(state, "a", out)
        skipped = max(skipped, 3 - len(state.read))
        assert_same(ParameterStore(out), MemoryState())
        assert [path.name for path in out.parent.iterdir()] == ["store"]
    else:
        pytest.fail("it never ended")
    assert skipped == 3


def test_a_partial_store_of_another_checkpoint_is_thrown_away(tmp_path: Path) -> None:
    out = tmp_path / "store"
    with pytest.MonkeyPatch.context() as patch:
        Faults(patch, 12, Killed())
        with pytest.raises(Killed):
            write_store(MemoryState(seed=1), "old", out)
    assert any((tmp_path / ".store.partial" / "parameters").iterdir())
    write_store(MemoryState(seed=2), "new", out)
    assert_same(ParameterStore(out), MemoryState(seed=2))


def test_no_store(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"is .* a store"):
        ParameterStore(tmp_path)
    (tmp_path / "index.json").write_text("{}")
    with pytest.raises(UserError, match="not the index"):
        ParameterStore(tmp_path)
    (tmp_path / "index.json").write_text('{"format_version": 2}')
    with pytest.raises(FormatError, match="convert again"):
        ParameterStore(tmp_path)
