"""From a live two-rank ZeRO engine through a checkpoint to Transformers, a sample and the store."""

import argparse
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from fmengine.checkpoint.collective import TorchCollective
from fmengine.checkpoint.durable import save_deepspeed
from fmengine.checkpoint.find import find_newest
from fmengine.checkpoint.manifest import Layout
from fmengine.checkpoint.save import save
from fmengine.checkpoint.store import ParameterStore, convert
from fmengine.commands import export as export_command
from fmengine.commands import generate as generate_command
from fmengine.data.tokenizer import save_tokenizer, train_bpe
from fmengine.errors import UserError
from support.checkpoints import header
from support.models import tiny_config

MODEL = tiny_config(
    "llama",
    vocab_size=270,
    pad_vocab_to_multiple_of=64,
    hidden_size=16,
    intermediate_size=24,
    num_key_value_heads=2,
    max_position_embeddings=32,
)


def train_and_save(run: str, stage: int) -> dict[str, torch.Tensor]:
    import deepspeed

    from fmengine.kernels.attention import dense_attention
    from fmengine.models.registry import build
    from fmengine.models.weights import from_seed, load_weights

    model = build(MODEL, attention=dense_attention(mask_documents=True))
    load_weights(model, from_seed(MODEL, 0))
    groups = [{"params": [p for p in model.parameters() if (p.ndim > 1) is matrix]} for matrix in (True, False)]
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage},
        "bf16": {"enabled": False},
        "steps_per_print": 2**31 - 1,
    }
    optimizer = torch.optim.AdamW(groups, lr=1e-3)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    ids = torch.arange(9)[None] * 5 + torch.distributed.get_rank()
    for _ in range(2):
        positions, bounds = torch.arange(8)[None], torch.tensor([0, 8], dtype=torch.int32)
        engine.backward(engine(ids[:, :-1], positions, bounds, ids[:, 1:]))
        engine.step()
    names = {name: name for name, _ in engine.module.named_parameters()}
    layout = Layout(world_size=2, zero_stage=stage, precision="fp32")
    saved = header(2, MODEL).model_copy(update={"layout": layout})
    save(Path(run), saved, partial(write, engine, names), collective=TorchCollective(), keep=1)
    from deepspeed.utils import safe_get_full_fp32_param

    return {name: safe_get_full_fp32_param(p).detach().clone() for name, p in engine.module.named_parameters()}


def write(engine: Any, names: dict[str, str], folder: Path) -> None:
    save_deepspeed(engine, folder, names)


def arguments(command: Any, *words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return parser.parse_args(words)


@pytest.mark.parametrize("stage", [1, 3])
def test_checkpoint_to_transformers_sample_and_store(
    workers, tmp_path: Path, capsys: pytest.CaptureFixture[str], stage: int
) -> None:
    from transformers import AutoModelForCausalLM

    run, out = tmp_path / "run", tmp_path / "out"
    run.mkdir()
    live = workers(2).run(train_and_save, str(run), stage)[0]
    with pytest.raises(UserError, match="tokenizer"):
        generate_command.run(arguments(generate_command, str(run)), {})
    save_tokenizer(train_bpe(["the cat sat on the mat"] * 4, 270), run / "tokenizer", "<|endoftext|>")

    assert export_command.run(arguments(export_command, str(run), "--out", str(out), "--dtype", "float32"), {}) == 0
    theirs = AutoModelForCausalLM.from_pretrained(out)
    assert torch.equal(theirs.get_input_embeddings().weight, live["embed.weight"][:270])
    assert torch.equal(theirs.model.layers[1].mlp.up_proj.weight, live["layers.1.mlp.gate_up.weight"][24:])
    said = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in said] == ["reading", "tokenizer", "writing", *["verified"] * 2, "exported"]

    words = [str(run), "--prompt", "the cat", "--max-new-tokens", "5", "--temperature", "0"]
    assert generate_command.run(arguments(generate_command, *words), {}) == 0
    ours = capsys.readouterr().out
    assert ours.startswith("the cat")
    assert len(ours) > len("the cat\n")

    checkpoint = find_newest(run)
    assert checkpoint is not None
    before = {path: path.read_bytes() for path in checkpoint.rglob("*") if path.is_file()}
    convert(checkpoint, tmp_path / "store")
    store = ParameterStore(tmp_path / "store")
    assert store.step == 2
    assert sorted(store.names()) == sorted(live)
    assert all(torch.equal(store.weight(name), weight) for name, weight in live.items())
    assert {path: path.read_bytes() for path in checkpoint.rglob("*") if path.is_file()} == before
    made = (tmp_path / "store" / "index.json").stat().st_mtime_ns
    convert(checkpoint, tmp_path / "store")
    assert (tmp_path / "store" / "index.json").stat().st_mtime_ns == made
