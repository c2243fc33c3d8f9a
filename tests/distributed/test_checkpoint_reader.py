"""Our reader of DeepSpeed's files against the live engine that wrote them, for every ZeRO stage and a pipeline."""

import errno
import os
import resource
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from fmengine.checkpoint.collective import TorchCollective
from fmengine.checkpoint.durable import TAG, save_deepspeed
from fmengine.checkpoint.find import find_newest, verify
from fmengine.checkpoint.manifest import Layout
from fmengine.checkpoint.reader import StateReader, open_unchecked
from fmengine.checkpoint.save import save
from fmengine.errors import UserError
from support.checkpoints import header
from support.models import tiny_config
from support.tiny import tiny_engine, train

MODEL = tiny_config(
    "llama",
    vocab_size=12,
    hidden_size=8,
    num_attention_heads=2,
    num_key_value_heads=1,
    intermediate_size=12,
    max_position_embeddings=16,
)


def no_merge(name: str, pieces: Any) -> torch.Tensor:
    raise AssertionError("there is no tensor parallelism here")


def save_both(engine: Any, names: dict[str, str], run: Path, layout: Layout) -> Path:
    saved = header(engine.global_steps).model_copy(update={"layout": layout})
    return save(run, saved, partial(_write, engine, names), collective=TorchCollective(), keep=1)


def _write(engine: Any, names: dict[str, str], folder: Path) -> None:
    save_deepspeed(engine, folder, names)


def live_values(engine: Any, stage: int) -> dict[str, list[torch.Tensor]]:
    """Weight and both moments of this rank's parameters, as DeepSpeed itself gives them (collective)."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    if hasattr(engine.optimizer, "_lazy_init_hp_params_optimizer_state"):
        # ZeRO-1 and 2 link the moments after the first group's first step, when the second group has none yet
        engine.optimizer._hp_optimizer_states_linked = False
        engine.optimizer._lazy_init_hp_params_optimizer_state()
    values = {}
    for name, parameter in engine.module.named_parameters():
        if stage == 0:
            state = engine.optimizer.state[parameter]
            tensors = [parameter, state["exp_avg"], state["exp_avg_sq"]]
        else:
            moments = [safe_get_full_optimizer_state(parameter, key) for key in ("exp_avg", "exp_avg_sq")]
            tensors = [safe_get_full_fp32_param(parameter), *moments]
        values[name] = [tensor.detach().clone() for tensor in tensors]
    return values


def differences(reader: StateReader, live: dict[str, list[torch.Tensor]], names: dict[str, str]) -> list[str]:
    """What is not bit for bit the live value."""
    wrong = []
    for name, expected in live.items():
        read = [reader.weight(names[name]), *reader.moments(names[name])]
        for kind, ours, theirs in zip(("weight", "exp_avg", "exp_avg_sq"), read, expected, strict=True):
            same = ours.dtype == torch.float32 and ours.shape == theirs.shape and torch.equal(ours, theirs)
            if not same or not theirs.any():
                wrong.append(f"{name} {kind}")
    return wrong


def zero_rank(run: str, stage: int, precision: str, steps: int) -> tuple[list[str], list[str], int]:
    extra = {"zero_optimization": {"stage": stage, "sub_group_size": 60}} if stage == 3 else None
    engine = tiny_engine(stage, precision, extra=extra)
    train(engine, range(steps))
    names = {name: f"canonical.{name}" for name, _ in engine.module.named_parameters()}
    layout = Layout(world_size=2, zero_stage=stage, precision=precision)
    checkpoint = save_both(engine, names, Path(run), layout)
    live = live_values(engine, stage)
    reader = open_unchecked(checkpoint / "engine", 1, 1, no_merge)
    return differences(reader, live, names), reader.names(), reader.step


@pytest.mark.parametrize(
    ("stage", "precision"),
    [(0, "fp32"), (1, "fp32"), (2, "fp32"), (3, "fp32"), (1, "bf16"), (2, "bf16"), (3, "bf16")],
)
def test_reader_against_the_live_engine(workers, run: Path, stage: int, precision: str) -> None:
    for wrong, names, step in workers(2).run(zero_rank, str(run), stage, precision, 3):
        assert wrong == []
        parameters = ["first.weight", "first.bias", "norm.weight", "norm.bias", "second.weight"]
        assert sorted(names) == sorted(f"canonical.{name}" for name in parameters)
        assert step == 3
    newest = find_newest(run)
    assert newest is not None
    verify(newest, full=True)
    assert not list(newest.rglob("zero_to_fp32.py"))


def fresh_rank(run: str, stage: int) -> list[bool]:
    engine = tiny_engine(stage)
    names = {name: name for name, _ in engine.module.named_parameters()}
    checkpoint = save_both(engine, names, Path(run), Layout(world_size=2, zero_stage=stage, precision="fp32"))
    reader = open_unchecked(checkpoint / "engine", 1, 1, no_merge)
    return [reader.step == 0, *(not moment.any() for name in reader.names() for moment in reader.moments(name))]


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_moments_before_the_first_step_are_zero(workers, run: Path, stage: int) -> None:
    for answers in workers(2).run(fresh_rank, str(run), stage):
        assert all(answers)
        assert len(answers) == 11


# DeepSpeed keeps the pipeline's mpu in a process global, hence processes of their own
def pipeline_rank(run: str, stage: int, tied: bool) -> tuple[list[str], list[str]]:
    import deepspeed

    from fmengine.engine.pipeline import pipeline_module, stage_names
    from fmengine.kernels.attention import dense_attention
    from fmengine.models.registry import stages
    from fmengine.parallel import Topology

    topology = Topology(torch.distributed.get_rank(), 2, pipeline_parallel_size=2)
    torch.manual_seed(0)
    model = MODEL.model_copy(update={"tie_word_embeddings": tied})
    module = pipeline_module(stages(model, attention=dense_attention(mask_documents=True)), topology, tied=tied)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 2,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage},
        "bf16": {"enabled": False},
        "steps_per_print": 2**31 - 1,
    }
    engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=config)
    ids = torch.arange(8)[None] % 12
    inputs = (ids, ids, ids, torch.tensor([0, 8], dtype=torch.int32))
    engine.train_batch(iter([(inputs, torch.ones(()))] * 2))
    names = stage_names(engine.module)
    layout = Layout(world_size=2, pipeline=2, zero_stage=stage, precision="fp32")
    checkpoint = save_both(engine, names, Path(run), layout)
    reader = open_unchecked(checkpoint / "engine", 1, 2, no_merge)
    return differences(reader, live_values(engine, stage), names), reader.names()


@pytest.mark.parametrize(("stage", "tied"), [(0, False), (1, False), (0, True), (1, True)])
def test_pipeline_stages_under_canonical_names(workers, run: Path, stage: int, tied: bool) -> None:
    from fmengine.models.registry import family_of

    for wrong, names in workers(2, "pipeline").run(pipeline_rank, str(run), stage, tied):
        assert wrong == []
        model = MODEL.model_copy(update={"tie_word_embeddings": tied})
        assert sorted(names) == sorted(family_of(MODEL).parameter_shapes(model))


def full_disk_rank(run: str, bad_rank: int) -> str:
    """A limit on this process's file size stands in for a full disk: the write fails in the middle."""
    engine = tiny_engine(2)
    train(engine, range(2))
    names = {name: name for name, _ in engine.module.named_parameters()}
    rank = torch.distributed.get_rank()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    if rank == bad_rank:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, before[1]))
    try:
        save_both(engine, names, Path(run), Layout(world_size=2, zero_stage=2, precision="fp32"))
    except UserError as error:
        return str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    return ""


@pytest.mark.parametrize("bad_rank", [0, 1])
def test_one_ranks_full_disk_inside_deepspeed_hangs_nobody(workers, run: Path, bad_rank: int) -> None:
    lines = workers(2).run(full_disk_rank, str(run), bad_rank, timeout=60)
    assert lines[0] == lines[1]
    assert os.strerror(errno.EFBIG) in lines[0]
    assert f"{TAG}/" in lines[0]
    assert f"on rank {bad_rank}" in lines[0]
    assert find_newest(run) is None


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return tmp_path
