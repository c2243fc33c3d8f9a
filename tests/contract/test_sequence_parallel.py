"""Sequence parallelism's groups: which mpu gives ZeRO the right ranks, and by what the gradients are divided.

Both ranks hold different slices of one sample, so the gradient is the SUM over them: 2 x the mean.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from support.deepspeed_state import read_state
from support.distributed import WorkerPool
from support.tiny import adamw, config, micro_batch, tiny_net, train
from support.tiny_lm import tensor_parallel_section, tiny_lm, tokens

STAGES = [(0, "fp32"), (1, "fp32"), (2, "fp32"), (3, "fp32"), (2, "bf16"), (3, "bf16")]
MESH = {"sequence_parallel_size": 2, "data_parallel_size": 1}
Pools = Callable[..., WorkerPool]


def engine_with(stage: int, precision: str, mpu: Any = None, **keys: Any) -> Any:
    import deepspeed

    model = tiny_net()
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=adamw(model), config=config(stage, precision, **keys), mpu=mpu
    )
    return engine


def deepspeed_mpu() -> Any:
    from deepspeed.runtime.sequence_parallel import parallel_state_sp

    if parallel_state_sp._SEQUENCE_PARALLEL_GROUP is None:
        parallel_state_sp.initialize_sequence_parallel(2)
    return parallel_state_sp


def mpu_without_the_alias() -> Any:
    """DeepSpeed's mpu whose model-parallel group is this rank alone, not the sequence group."""
    ours = deepspeed_mpu()
    alone = [torch.distributed.new_group([rank]) for rank in range(2)][torch.distributed.get_rank()]
    sequence = {name: getattr(ours, name) for name in vars(ours) if name.startswith("get_sequence")}
    return SimpleNamespace(
        **sequence,
        initialize_sequence_parallel=ours.initialize_sequence_parallel,  # DeepSpeed tells a sequence mpu by it
        get_model_parallel_rank=lambda: 0,
        get_model_parallel_world_size=lambda: 1,
        get_model_parallel_group=lambda: alone,
    )


def one_step(engine: Any) -> dict[str, Any]:
    train(engine, range(1))
    norm = engine.get_global_grad_norm()
    gradients = [values["exp_avg"] / 0.1 for values in read_state(engine).values()]
    return {
        "norm": None if norm is None else float(norm),
        "gradient": float(torch.cat([gradient.flatten() for gradient in gradients]).norm()),
        "zero ranks": torch.distributed.get_world_size(engine.seq_data_parallel_group),
        "sequence size": engine.sequence_parallel_size,
        "batch": engine.train_batch_size(),
    }


def gradient_norm(model: torch.nn.Module) -> float:
    return float(torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]))


def plain_norm() -> float:
    """Of the summed gradient of both ranks' slices."""
    model = tiny_net()
    for rank in range(2):
        model(*micro_batch(0, 0, rank)).backward()
    return gradient_norm(model)


def with_deepspeed_mpu() -> dict[tuple[int, str], dict[str, Any]]:
    return {(stage, precision): one_step(engine_with(stage, precision, deepspeed_mpu())) for stage, precision in STAGES}


def test_the_sequence_mpu_gives_zero_the_right_ranks(workers: Pools) -> None:
    """`mpu=parallel_state_sp`: ZeRO reduces over sequence x data ranks, and the batch counts data ranks alone.
    ZeRO 0 to 2 divide the sum by the data-parallel size (here 1), ZeRO-3 by all the ranks it shards over (here 2).
    """
    wanted = plain_norm()
    for (stage, precision), result in workers(2, "sequence").run(with_deepspeed_mpu)[0].items():
        assert (result["zero ranks"], result["sequence size"], result["batch"]) == (2, 2, 2)
        close = pytest.approx(wanted / (2 if stage == 3 else 1), rel=1e-5 if precision == "fp32" else 2e-2)
        assert result["gradient"] == close
        assert result["norm"] is None if stage == 0 else result["norm"] == close


def bf16_at_zero1() -> str:
    """BF16_Optimizer with DeepSpeed's mpu; the step's own part without collectives, lest the other rank waits."""
    engine = engine_with(1, "bf16", deepspeed_mpu())
    engine.backward(engine(*micro_batch(0, 0, torch.distributed.get_rank())) * 1.0, scale_wrt_gas=False)
    counted, _ = engine.optimizer.get_grads_for_norm()
    return f"{len(counted)} of {sum(len(group) for group in engine.optimizer.bf16_groups)}"


def test_zero1_in_bf16_breaks_with_the_sequence_mpu(workers: Pools) -> None:
    """The mpu passes the sequence group off as the model-parallel group, and BF16_Optimizer counts the norm of
    unsharded parameters on model-parallel rank 0 alone: the other ranks find no gradient and raise in `step`.
    """
    first, second = workers(2, "sequence").run(bf16_at_zero1)
    assert first == "5 of 5"
    assert second == "0 of 5"


def with_our_mpu() -> dict[tuple[int, str], dict[str, Any]]:
    mpu = mpu_without_the_alias()
    layouts = [*STAGES, (1, "bf16")]
    return {
        (stage, precision): one_step(engine_with(stage, precision, mpu, clipping=1.0)) for stage, precision in layouts
    }


def test_an_mpu_without_the_alias_works_at_every_stage(workers: Pools) -> None:
    """The same functions with a model-parallel group of one: norms are right, and so is clipping, also at ZeRO-1 in
    bf16.
    """
    wanted = plain_norm()
    for (stage, precision), result in workers(2, "sequence").run(with_our_mpu)[0].items():
        assert result["zero ranks"] == 2
        assert result["gradient"] == pytest.approx(1.0, rel=1e-4)
        if stage:
            tolerance = 1e-5 if precision == "fp32" else 2e-2
            assert result["norm"] == pytest.approx(wanted / (2 if stage == 3 else 1), rel=tolerance)


def with_tensor_parallel(mpu: Any, extra: dict[str, int]) -> tuple[int, float]:
    """Sequence size that DeepSpeed sees, and the first gradient's norm."""
    import deepspeed

    model = tiny_lm()
    section = {"tensor_parallel": tensor_parallel_section(2)}
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=adamw(model), config=config(1, extra=section | extra), mpu=mpu
    )
    engine.backward(engine(*tokens(0)) * 1.0, scale_wrt_gas=False)
    engine.step()
    return engine.sequence_parallel_size, float(engine.get_global_grad_norm())


def tensor_parallel_with_mpu() -> tuple[int, float]:
    return with_tensor_parallel(deepspeed_mpu(), {})


def test_sequence_and_tensor_parallelism_together_are_silently_wrong_with_the_mpu(workers: Pools) -> None:
    """Sequence 2 x tensor 2 on TWO ranks builds and trains: AutoTP replaces the mpu and the sequence size is 1."""
    assert [size for size, _ in workers(2, "sequence").run(tensor_parallel_with_mpu)] == [1, 1]


def with_mesh() -> dict[int, dict[str, Any]]:
    return {stage: one_step(engine_with(stage, "fp32", extra=MESH)) for stage in (0, 1, 2)}


def test_the_configured_mesh_leaves_the_sequence_ranks_out(workers: Pools) -> None:
    """`sequence_parallel_size` and `data_parallel_size` in the config: ZeRO's group is the data ranks alone, so each
    rank steps on its own slice's gradient and the ranks' weights part, with no word said.
    """
    first, second = workers(2, "mesh").run(with_mesh)
    for stage, result in first.items():
        assert (result["zero ranks"], result["sequence size"]) == (1, 2)
        assert result["gradient"] != pytest.approx(second[stage]["gradient"], rel=0.1)


def tensor_parallel_with_mesh() -> tuple[int, float]:
    return with_tensor_parallel(None, MESH)


def test_sequence_and_tensor_parallelism_together_are_silently_wrong_with_the_mesh(workers: Pools) -> None:
    """Sequence 2 x tensor 2 on two ranks builds there too, and its gradient is twice the right one."""
    model = tiny_lm()
    model(*tokens(0)).backward()
    wanted = gradient_norm(model)
    for size, norm in workers(2, "mesh").run(tensor_parallel_with_mesh):
        assert size == 2
        assert norm == pytest.approx(2 * wanted, rel=1e-4)
