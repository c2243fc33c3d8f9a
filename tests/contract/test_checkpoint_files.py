"""What `save_checkpoint` writes, by layout, and how to read a parameter out of it without an engine."""

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from support.checkpoint_reader import MOMENTS, load, optimizer_files, read_parameter
from support.deepspeed_state import State, read_state
from support.distributed import WorkerPool
from support.tiny import adamw, config, micro_batch, tiny_engine, train
from support.tiny_lm import tensor_parallel_section, tiny_lm, tokens
from support.tiny_pipeline import pipeline

LAYOUTS = [(1, "fp32"), (2, "fp32"), (3, "fp32"), (1, "bf16"), (2, "bf16"), (3, "bf16")]
PIPELINES = [(0, "fp32"), (1, "fp32"), (1, "bf16")]
TENSOR_PARALLEL = [(1, "bf16"), (3, "bf16")]
TAG = "state"
Pools = Callable[..., WorkerPool]
Saved = dict[tuple[int, str], list[State]]


def save(engine: Any, folder: str) -> State:
    engine.save_checkpoint(folder, tag=TAG, save_latest=False)
    return read_state(engine)


def save_zero(folder: str, stage: int, precision: str, extra: dict[str, Any] | None = None) -> State:
    engine = tiny_engine(stage, precision, extra=extra)
    train(engine, range(2))
    return save(engine, folder)


def save_pipeline(folder: str, stage: int, precision: str) -> State:
    engine = pipeline(stage, precision)
    engine.train_batch(iter([micro_batch(0)]))
    return save(engine, folder)


def save_tensor_parallel(folder: str, stage: int, precision: str) -> State:
    import deepspeed

    model = tiny_lm()
    section = config(stage, precision, extra={"tensor_parallel": tensor_parallel_section(2)})
    engine, *_ = deepspeed.initialize(model=model, optimizer=adamw(model), config=section)
    engine.backward(engine(*tokens(0)) * 1.0, scale_wrt_gas=False)
    engine.step()
    return save(engine, folder)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def saved(workers: Pools, root: Path) -> dict[str, Saved]:
    """By kind and layout, what each rank's engine held when it saved under root/<kind>-<stage>-<precision>."""
    pool, pipeline_pool, tensor_pool = workers(2), workers(2, "pipeline"), workers(2, "tensor-parallel")

    def run(pool: WorkerPool, function: Any, kind: str, layouts: list[tuple[int, str]]) -> Saved:
        return {
            (stage, precision): pool.run(function, str(root / f"{kind}-{stage}-{precision}"), stage, precision)
            for stage, precision in layouts
        }

    return {
        "zero": run(pool, save_zero, "zero", [(0, "fp32"), *LAYOUTS]),
        "pipe": run(pipeline_pool, save_pipeline, "pipe", PIPELINES),
        "tensor": run(tensor_pool, save_tensor_parallel, "tensor", TENSOR_PARALLEL),
    }


def files(root: Path, kind: str, stage: int, precision: str) -> list[str]:
    folder = root / f"{kind}-{stage}-{precision}"
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_the_files_of_zero(saved: Any, root: Path) -> None:
    """Model states once at ZeRO 0 to 2, by rank at ZeRO-3; optimizer shards by rank, prefixed in bf16 at every stage;
    two scripts beside the tag's folder where ZeRO is on.
    """
    scripts = ["zero_to_fp32.py", "zero_to_torch.py"]
    shards = [f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in range(2)]
    assert files(root, "zero", 0, "fp32") == ["state/mp_rank_00_model_states.pt"]
    for stage, precision in LAYOUTS:
        prefix = "bf16_" if precision == "bf16" else ""
        states = [f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt" for rank in range(2)]
        wanted = [*(prefix + shard for shard in shards), *(states if stage == 3 else ["mp_rank_00_model_states.pt"])]
        assert files(root, "zero", stage, precision) == sorted([*(f"state/{name}" for name in wanted), *scripts])


def test_the_files_of_a_pipeline(saved: Any, root: Path) -> None:
    """The weights by layer (without data rank), `mp_rank` is the stage; at ZeRO-0 the optimizer is in the stage's
    model states.
    """
    layers = [f"state/layer_{layer:02d}-model_states.pt" for layer in range(3)]
    states = [f"state/mp_rank_{stage:02d}_model_states.pt" for stage in range(2)]
    assert files(root, "pipe", 0, "fp32") == [*layers, *states]
    for precision, prefix in (("fp32", ""), ("bf16", "bf16_")):
        shards = [f"state/{prefix}zero_pp_rank_0_mp_rank_{stage:02d}_optim_states.pt" for stage in range(2)]
        wanted = sorted([*layers, *states, *shards, "zero_to_fp32.py", "zero_to_torch.py"])
        assert files(root, "pipe", 1, precision) == wanted


def test_the_files_of_tensor_parallelism(saved: Any, root: Path) -> None:
    """`mp_rank` is the tensor rank."""
    shards = [f"state/bf16_zero_pp_rank_0_mp_rank_{rank:02d}_optim_states.pt" for rank in range(2)]
    for stage, model_states in (
        (1, "state/mp_rank_0{}_model_states.pt"),
        (3, "state/zero_pp_rank_0_mp_rank_0{}_model_states.pt"),
    ):
        states = [model_states.format(rank) for rank in range(2)]
        assert files(root, "tensor", stage, "bf16") == sorted([*shards, *states, "zero_to_fp32.py", "zero_to_torch.py"])


def same(folder: Path, state: State, model_rank: int = 0) -> None:
    for name, values in state.items():
        for key in ("weight", *MOMENTS):
            assert torch.equal(read_parameter(folder / TAG, name, key, model_rank), values[key]), (folder, name, key)


def test_the_reader_finds_every_parameter_of_zero(saved: Any, root: Path) -> None:
    """support.checkpoint_reader says where a parameter's fp32 weight and moments lie."""
    for stage, precision in LAYOUTS:
        same(root / f"zero-{stage}-{precision}", saved["zero"][stage, precision][0])


def test_the_reader_finds_every_parameter_of_a_pipeline_s_stage(saved: Any, root: Path) -> None:
    """The same format by stage; parameters have the pipeline's names (layer number first)."""
    for precision in ("fp32", "bf16"):
        for stage, state in enumerate(saved["pipe"][1, precision]):
            same(root / f"pipe-1-{precision}", state, model_rank=stage)


def test_the_reader_finds_every_shard_of_tensor_parallelism(saved: Any, root: Path) -> None:
    """Each tensor rank's shard, under the parameter's own name."""
    for stage, precision in TENSOR_PARALLEL:
        for rank, state in enumerate(saved["tensor"][stage, precision]):
            same(root / f"tensor-{stage}-{precision}", state, model_rank=rank)


def test_zero0_keeps_the_optimizer_in_the_model_states_by_number(saved: Any, root: Path) -> None:
    """Torch's own state_dict: parameters are numbered in the order of the groups."""
    content = load(root / "zero-0-fp32" / TAG / "mp_rank_00_model_states.pt")
    state = saved["zero"][0, "fp32"][0]
    numbered = ["first.weight", "second.weight", "first.bias", "norm.weight", "norm.bias"]
    assert [group["params"] for group in content["optimizer"]["param_groups"]] == [[0, 1], [2, 3, 4]]
    for number, name in enumerate(numbered):
        assert torch.equal(content["optimizer"]["state"][number]["exp_avg"], state[name]["exp_avg"])
        assert torch.equal(content["module"][name], state[name]["weight"])


def test_shards_of_the_last_rank_are_padded_or_not(saved: Any, root: Path) -> None:
    """21 elements on two ranks are partitions of 12, three of padding (ZeRO-1/2 align to 2 x ranks elements). The
    weights are saved without it by DeepSpeedZeroOptimizer, the moments with it; BF16_Optimizer saves both with it.
    """
    for (stage, precision), length in {(1, "fp32"): 9, (2, "bf16"): 9, (1, "bf16"): 12}.items():
        shard = load(optimizer_files(root / f"zero-{stage}-{precision}" / TAG)[1])["optimizer_state_dict"]
        assert shard["single_partition_of_fp32_groups"][1].numel() == length
        assert shard["base_optimizer_state"]["state"][1]["exp_avg"].numel() == 12
        assert shard["group_paddings"] == [0, 3]


def test_zero3_s_model_states_hold_no_weights(saved: Any, root: Path) -> None:
    """Empty tensors; their shapes are in `param_shapes`, a dictionary a parameter group."""
    content = load(root / "zero-3-bf16" / TAG / "zero_pp_rank_0_mp_rank_00_model_states.pt")
    assert all(tensor.numel() == 0 for tensor in content["module"].values())
    assert [list(group) for group in content["param_shapes"]] == [
        ["first.weight", "second.weight"],
        ["first.bias", "norm.weight", "norm.bias"],
    ]


def test_zero3_s_sub_groups_are_read_in_a_row(workers: Pools, tmp_path: Path) -> None:
    """With a small `sub_group_size` a parameter group is several flat tensors and optimizer states."""
    extra = {"zero_optimization": {"stage": 3, "sub_group_size": 10}}
    state = workers(2).run(save_zero, str(tmp_path), 3, "bf16", extra)[0]
    shard = load(optimizer_files(tmp_path / TAG)[0])["optimizer_state_dict"]
    assert len(shard["fp32_flat_groups"]) > 2
    same(tmp_path, state)


@pytest.mark.parametrize(("stage", "precision"), LAYOUTS)
def test_optimizer_shards_need_four_classes_allowed(saved: Any, root: Path, stage: int, precision: str) -> None:
    """`torch.load(weights_only=True)` refuses them as they are; with the four that `load` names it reads them, so no
    arbitrary code runs. Model states need none.
    """
    folder = root / f"zero-{stage}-{precision}" / TAG
    shard = optimizer_files(folder)[0]
    with pytest.raises(pickle.UnpicklingError):
        torch.load(shard, weights_only=True)
    assert load(shard)["optimizer_state_dict"]
    for states in folder.glob("*model_states.pt"):
        assert torch.load(states, weights_only=True)["global_steps"] == 2
