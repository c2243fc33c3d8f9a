"""AutoTP on our kind of model: fused QKV with grouped queries, fused gate/up, biases, the head replicated."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from support.deepspeed_state import read_state
from support.distributed import WorkerPool
from support.tiny import adamw, config
from support.tiny_lm import (
    FEED_FORWARD,
    HEAD_DIM,
    HEADS,
    KV_HEADS,
    WIDTH,
    tensor_parallel_section,
    tiny_lm,
    tokens,
)

STAGES = [(0, "fp32"), (1, "fp32"), (2, "fp32"), (3, "fp32"), (1, "bf16"), (3, "bf16")]
STEPS = 3
CLIPPING = 1.0
Pools = Callable[..., WorkerPool]


def engine_at(stage: int, precision: str, extra: dict[str, Any] | None = None, *, meta: bool = False) -> Any:
    import deepspeed

    with torch.device("meta" if meta else "cpu"):
        model = tiny_lm()
    section = {"tensor_parallel": tensor_parallel_section(2)}
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=adamw(model),
        config=config(stage, precision, clipping=CLIPPING, extra=section | (extra or {})),
    )
    return engine


def trained(stage: int, precision: str) -> dict[str, Any]:
    engine = engine_at(stage, precision)
    kinds = {name: type(module).__name__ for name, module in engine.module.named_modules()}
    losses, norms = [], []
    for step in range(STEPS):
        loss = engine(*tokens(step))
        losses.append(float(loss.detach()))
        engine.backward(loss * 1.0, scale_wrt_gas=False)
        engine.step()
        norms.append(engine.get_global_grad_norm())
    sizes = (engine.dp_world_size, engine.mp_world_size)
    return {"losses": losses, "norms": norms, "state": read_state(engine), "kinds": kinds, "sizes": sizes}


def all_layouts() -> dict[tuple[int, str], dict[str, Any]]:
    return {layout: trained(*layout) for layout in STAGES}


def plain() -> tuple[list[float], list[float], dict[str, Tensor]]:
    model = tiny_lm()
    optimizer = adamw(model)
    losses, norms = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = model(*tokens(step))
        loss.backward()
        losses.append(float(loss.detach()))
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), CLIPPING)))
        optimizer.step()
    return losses, norms, {name: optimizer.state[parameter]["exp_avg"] for name, parameter in model.named_parameters()}


@pytest.fixture(scope="module")
def ranks(workers: Pools) -> list[dict[tuple[int, str], dict[str, Any]]]:
    return workers(2, "tensor-parallel").run(all_layouts)


def shard(name: str, whole: Tensor, rank: int) -> Tensor:
    """What AutoTP gives a rank: each part of a fused matrix is cut, and the pieces are put together again."""
    parts: list[int] | None = None
    if ".attn.qkv." in name:
        parts = [HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM]
    elif ".mlp.gate_up." in name:
        parts = [FEED_FORWARD, FEED_FORWARD]
    if parts is not None:
        return torch.cat([part.chunk(2)[rank] for part in torch.split(whole, parts)])
    if name.endswith(("attn.out.weight", "mlp.down.weight")):
        return whole.chunk(2, dim=1)[rank]
    return whole


def test_autotp_equals_the_plain_run(ranks: Any) -> None:
    """At ZeRO 0 to 3 in fp32: loss, norm before clipping (which counts replicated parameters once), and the clipped
    gradient's moments, shard by shard. The bias goes with its matrix: cut for column, whole for row. In bf16 to its
    precision.
    """
    losses, norms, moments = plain()
    for rank, results in enumerate(ranks):
        for (stage, precision), result in results.items():
            loose = precision == "bf16"
            assert result["losses"] == pytest.approx(losses, rel=2e-2 if loose else 1e-5)
            if stage:
                assert [float(norm) for norm in result["norms"]] == pytest.approx(norms, rel=2e-2 if loose else 1e-5)
            assert set(result["state"]) == set(moments)
            for name, moment in moments.items():
                got, wanted = result["state"][name]["exp_avg"], shard(name, moment, rank)
                where = f"rank {rank}, ZeRO-{stage}, {precision}, {name}"
                relative, absolute = (0.1, 4e-3) if loose else (1e-4, 1e-6)
                assert torch.allclose(got, wanted, rtol=relative, atol=absolute), where


def test_names_stay_and_unnamed_modules_stay_whole(ranks: Any) -> None:
    """Parameter names do not change; `use_default_specs: false` leaves embedding, norms and head as they were."""
    for result in (results[1, "fp32"] for results in ranks):
        kinds = result["kinds"]
        assert kinds["layers.0.attn.qkv"] == kinds["layers.0.mlp.gate_up"] == "SubParamLinearLayer"
        assert kinds["layers.0.attn.out"] == kinds["layers.0.mlp.down"] == "LinearAllreduce"
        assert (kinds["embed"], kinds["norm"], kinds["lm_head"]) == ("Embedding", "LayerNorm", "Linear")
        assert result["sizes"] == (1, 2)
        assert result["state"]["layers.0.mlp.down.bias"]["weight"].shape == (WIDTH,)


def attributes() -> tuple[int, int]:
    attention = engine_at(1, "fp32").module.layers[0].attn
    return attention.num_heads, attention.heads_of_model


def test_autotp_divides_attributes_with_known_names(workers: Pools) -> None:
    """On a module with sharded weights below it `num_heads`, `num_kv_heads`, `num_key_value_heads`, `hidden_size`,
    `embed_dim` and others (AutoTP.update_mp_params) become the shard's; other names stay. Count heads from the
    activation's width and neither matters.
    """
    assert workers(2, "tensor-parallel").run(attributes) == [(HEADS // 2, HEADS)] * 2


def batch_sizes() -> dict[str, Any]:
    from deepspeed.runtime.config import DeepSpeedConfig

    answers: dict[str, Any] = {"unset": engine_at(1, "fp32").train_batch_size()}
    section = config(1, extra={"tensor_parallel": tensor_parallel_section(2), "train_batch_size": 2})
    try:
        DeepSpeedConfig(section)
    except AssertionError as error:
        answers["data-parallel"] = str(error)
    return answers


def test_deepspeed_counts_tensor_ranks_as_data_ranks_in_its_batch_size(workers: Pools) -> None:
    """Without an mpu, `train_batch_size` must be micro batch x accumulation x the WHOLE world (here 4, not 2), or be
    left out.
    """
    answers = workers(2, "tensor-parallel").run(batch_sizes)[0]
    assert answers["unset"] == 4
    assert "train_batch_size is not equal" in answers["data-parallel"]


def meta_build() -> str:
    try:
        engine_at(1, "fp32", meta=True)
    except (NotImplementedError, RuntimeError) as error:
        return type(error).__name__
    return "built"


def test_a_model_on_the_meta_device_cannot_be_sharded(workers: Pools) -> None:
    """AutoTP cuts real tensors."""
    assert workers(2, "tensor-parallel").run(meta_build)[0] != "built"


def zero_init() -> list[float]:
    import deepspeed

    section = config(3, clipping=CLIPPING, extra={"tensor_parallel": tensor_parallel_section(2)})
    whole = dict(tiny_lm().named_parameters())
    with deepspeed.zero.Init(config_dict_or_path=section):
        model = tiny_lm()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            with deepspeed.zero.GatheredParameters(parameter, modifier_rank=0):
                parameter.copy_(whole[name])
    engine, *_ = deepspeed.initialize(model=model, optimizer=adamw(model), config=section)
    losses = []
    for step in range(2):
        loss = engine(*tokens(step))
        losses.append(float(loss.detach()))
        engine.backward(loss * 1.0, scale_wrt_gas=False)
        engine.step()
    return losses


def test_zero_init_goes_with_autotp(workers: Pools) -> None:
    """A model that was cut as it was made (`zero.Init`) is sharded again by AutoTP, right."""
    losses, _, _ = plain()
    assert workers(2, "tensor-parallel").run(zero_init)[0] == pytest.approx(losses[:2], rel=1e-5)
