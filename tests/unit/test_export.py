"""What is exported is the model: Transformers loads it and computes the same; anything else leaves nothing behind."""

import errno
import json
import os
import resource
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fmengine import export_check
from fmengine.config.model import ModelConfig, RopeScaling
from fmengine.data.tokenizer import save_tokenizer, train_bpe
from fmengine.errors import UserError
from fmengine.export import export_weights
from fmengine.export_check import ExportMismatchError
from fmengine.kernels.attention import dense_attention
from fmengine.models.registry import build, family_of
from fmengine.models.weights import from_pretrained, from_seed, load_weights
from support.models import tiny_config

LLAMA = tiny_config(
    "llama",
    vocab_size=270,
    pad_vocab_to_multiple_of=64,
    num_key_value_heads=2,
    max_position_embeddings=64,
    rope_theta=50000.0,
    initializer_range=0.2,
)
NEOX = tiny_config(
    "neox",
    vocab_size=270,
    pad_vocab_to_multiple_of=64,
    intermediate_size=64,
    max_position_embeddings=64,
    rotary_pct=0.5,
    initializer_range=0.2,
)
SCALING = RopeScaling(rope_type="llama3", factor=4.0, original_max_position_embeddings=16)
CONFIGS = {
    "llama": LLAMA,
    "llama tied, scaled": LLAMA.model_copy(update={"tie_word_embeddings": True, "rope_scaling": SCALING}),
    "neox": NEOX,
    "neox serial, tied": NEOX.model_copy(update={"use_parallel_residual": False, "tie_word_embeddings": True}),
}


def trained(config: ModelConfig) -> Callable[[str], Tensor]:
    """Weights that no initialisation gives: norms and biases differ from 1 and 0, padded rows are not zero."""
    source = from_seed(config, 1)

    def weights(name: str) -> Tensor:
        value = source(name)
        noise = torch.randn(value.shape, generator=torch.Generator().manual_seed(len(name) + sum(name.encode())))
        return value + 0.1 * noise

    return weights


def quiet(line: str) -> None:
    """Say nothing."""


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(train_bpe(["the cat sat on the mat"] * 4, 270), folder, "<|endoftext|>")
    return folder


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_transformers_loads_it_and_computes_the_same(tmp_path: Path, tokenizer: Path, name: str, dtype: str) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    config, out, lines = CONFIGS[name], tmp_path / "out", list[str]()
    weights = trained(config)
    export_weights(config, weights, tokenizer, out, dtype=dtype, max_shard_size=20_000, report=lines.append)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 2
    assert all((out / file).stat().st_size < 45_000 for file in index["weight_map"].values())
    theirs = AutoModelForCausalLM.from_pretrained(out)
    assert theirs.dtype == getattr(torch, dtype)
    assert theirs.get_input_embeddings().weight.shape[0] == 270
    assert theirs.config.eos_token_id == 0
    ours = build(config, attention=dense_attention(mask_documents=False))
    load_weights(ours, lambda name: weights(name).to(getattr(torch, dtype)).float())
    ids = torch.arange(40)[None] * 7 % 270
    with torch.no_grad():
        expected = ours(ids, torch.arange(40)[None], torch.tensor([0, 40], dtype=torch.int32))
        found = theirs.float()(ids).logits
    assert (found - expected).abs().max() / expected.abs().max() < 1e-5
    assert AutoTokenizer.from_pretrained(out).decode([0]) == "<|endoftext|>"
    assert [line.split()[0] for line in lines if "writing" not in line] == [
        "tokenizer",
        "verified",
        "verified",
        "exported",
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("name", CONFIGS)
def test_back_to_our_weights_bit_for_bit(tmp_path: Path, name: str) -> None:
    config, weights = CONFIGS[name], trained(CONFIGS[name])
    export_weights(config, weights, None, tmp_path / "out", dtype="float32", verify_result=False, report=quiet)
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["config.json", "model.safetensors"]
    back = from_pretrained(config.model_copy(update={"pretrained": tmp_path / "out"}))
    for parameter, shape in family_of(config).parameter_shapes(config).items():
        expected = weights(parameter)
        if shape[0] == 320:
            expected[270:] = 0
        assert torch.equal(back(parameter), expected), parameter


def swap_heads(config: ModelConfig, weights: Callable[[str], Tensor]) -> Callable[[str], Tensor]:
    def wrong(name: str) -> Tensor:
        value = weights(name)
        if name == "layers.1.attn.qkv.weight":
            value = value.clone()
            value[:8], value[8:16] = value[8:16].clone(), value[:8].clone()
        return value

    return wrong


@pytest.mark.parametrize("name", ["llama", "neox"])
@pytest.mark.parametrize("whole", [True, False], ids=["whole model too", "blocks only"])
def test_a_wrong_export_is_an_error_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, whole: bool
) -> None:
    """The writer swaps two heads of one layer, as a wrong weight map would."""
    config, weights = CONFIGS[name], trained(CONFIGS[name])
    original = export_check.check_export
    if not whole:
        monkeypatch.setattr(export_check, "WHOLE_MODEL_BYTES", 0)

    def check(folder: Path, config: ModelConfig, written: Any, *rest: Any) -> None:
        original(folder, config, weights, *rest)

    monkeypatch.setattr("fmengine.export.check_export", check)
    export_weights(config, weights, None, tmp_path / "good", report=quiet)
    with pytest.raises(ExportMismatchError, match="block 1: Transformers computes something else"):
        export_weights(config, swap_heads(config, weights), None, tmp_path / "bad", report=quiet)
    assert [path.name for path in tmp_path.iterdir()] == ["good"]


@pytest.mark.parametrize("change", [{"rms_norm_eps": 1e-3}, {"rope_theta": 1e3}, {"num_key_value_heads": 4}])
def test_a_wrong_config_json_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any]) -> None:
    from fmengine.models import hf

    def wrong(config: ModelConfig) -> dict[str, Any]:
        written = hf.write_config(config) | change
        if "rope_theta" in change:
            written["rope_parameters"] |= change
        return written

    monkeypatch.setattr("fmengine.export.write_config", wrong)
    with pytest.raises(RuntimeError):
        export_weights(LLAMA, trained(LLAMA), None, tmp_path / "out", report=quiet)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("changed", ["embed.weight", "norm.weight", "lm_head.weight"])
def test_embedding_norm_and_head_are_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: str) -> None:
    weights = trained(LLAMA)
    original = export_check.check_export

    def check(folder: Path, config: ModelConfig, written: Any, *rest: Any) -> None:
        original(folder, config, weights, *rest)

    monkeypatch.setattr("fmengine.export.check_export", check)
    with pytest.raises(ExportMismatchError, match=rf"is not the checkpoint's {changed}"):
        export_weights(
            LLAMA, lambda name: weights(name) * (2 if name == changed else 1), None, tmp_path / "out", report=quiet
        )


def test_an_infinite_weight_is_an_error(tmp_path: Path) -> None:
    weights = trained(LLAMA)

    def broken(name: str) -> Tensor:
        value = weights(name)
        return value * torch.inf if name == "layers.0.mlp.down.weight" else value

    with pytest.raises(ExportMismatchError, match="block 0"):
        export_weights(LLAMA, broken, None, tmp_path / "out", report=quiet)


def test_one_shard_at_a_time(tmp_path: Path) -> None:
    """No more than a shard of parameters is alive while the export is written."""
    import weakref

    alive: set[int] = set()
    most = 0

    def weights(name: str) -> Tensor:
        nonlocal most
        tensor = from_seed(LLAMA, 1)(name)
        alive.add(key := id(tensor))
        weakref.finalize(tensor, alive.discard, key)
        most = max(most, len(alive))
        return tensor

    export_weights(LLAMA, weights, None, tmp_path / "out", max_shard_size=1, verify_result=False, report=quiet)
    assert most <= 2
    assert len(list((tmp_path / "out").glob("*.safetensors"))) == len(family_of(LLAMA).parameter_shapes(LLAMA))


def test_a_folder_that_is_not_empty_is_refused_without_force(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "precious").write_text("x")
    with pytest.raises(UserError, match="not empty; give another folder, or --force"):
        export_weights(LLAMA, trained(LLAMA), None, out, report=quiet)
    assert [path.name for path in out.iterdir()] == ["precious"]
    with pytest.raises(UserError, match="holds no model, so --force does not replace it"):
        export_weights(LLAMA, trained(LLAMA), None, out, force=True, report=quiet)
    assert [path.name for path in out.iterdir()] == ["precious"]
    (out / "config.json").write_text("of an older export")
    export_weights(LLAMA, trained(LLAMA), None, out, verify_result=False, force=True, report=quiet)
    assert sorted(path.name for path in out.iterdir()) == ["config.json", "model.safetensors"]


def test_a_full_disk_is_one_line_and_leaves_nothing(tmp_path: Path) -> None:
    """A limit on this process's file size stands in for a full disk; safetensors hits it in the middle of a file."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, limits[1]))
    try:
        with pytest.raises(UserError, match=f"{os.strerror(errno.EFBIG)}; nothing was exported"):
            export_weights(LLAMA, trained(LLAMA), None, tmp_path / "out", report=quiet)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert not list(tmp_path.iterdir())
