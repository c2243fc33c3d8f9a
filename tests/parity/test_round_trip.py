"""Weights through files: Transformers -> ours -> Transformers, bit for bit, and what is refused on the way."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from fmengine.config.model import ModelConfig
from fmengine.errors import UserError
from fmengine.models.hf import from_hf, read_config, to_hf, write_config
from fmengine.models.registry import family_of
from fmengine.models.safetensors_folder import SafetensorsFolder
from fmengine.models.weights import from_pretrained, load_weights
from support.models import difference, tiny_config, tiny_model, tokens, transformers_model, whole_rows

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"num_key_value_heads": 2, "attention_bias": True, "mlp_bias": True}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "neox": ("neox", {}),
    "neox-tied": ("neox", {"tie_word_embeddings": True}),
}


def saved(config: ModelConfig, folder: Path, *, shard: str = "1GB", dtype: torch.dtype = torch.float32) -> ModelConfig:
    """Save Transformers' model of the config; the config as read back from the folder."""
    transformers_model(config).to(dtype).save_pretrained(folder, max_shard_size=shard)
    return pretrained(folder)


def pretrained(folder: Path, **options: Any) -> ModelConfig:
    return ModelConfig.model_validate({**read_config(folder), "pretrained": folder, **options})


def read_all(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shard", ["1GB", "10KB"])
@pytest.mark.parametrize("case", CASES)
def test_bit_identical_through_files(case: str, shard: str, dtype: torch.dtype, tmp_path: Path) -> None:
    family, options = CASES[case]
    config = saved(tiny_config(family, **options), tmp_path, shard=shard, dtype=dtype)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (shard == "10KB")
    source = SafetensorsFolder(tmp_path)
    back: dict[str, Tensor] = {}
    for name in family_of(config).parameter_shapes(config):
        tensor = from_hf(config, name, source.read)
        back |= to_hf(config, name, tensor)
        assert torch.equal(from_pretrained(config)(name), tensor.float())
    before = read_all(tmp_path)
    assert back.keys() == before.keys()
    for name, tensor in before.items():
        assert back[name].dtype == dtype
        assert torch.equal(back[name], tensor)


@pytest.mark.parametrize("case", CASES)
def test_transformers_loads_what_we_write(case: str, tmp_path: Path) -> None:
    import transformers

    family, options = CASES[case]
    config = tiny_config(family, pad_vocab_to_multiple_of=32, **options)
    model = tiny_model(config)
    tensors = {k: v for name, p in model.named_parameters() for k, v in to_hf(config, name, p.detach()).items()}
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(write_config(config)))
    theirs, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert not info["mismatched_keys"]
    input_ids = tokens(2, 16)
    ours = model(input_ids, *whole_rows(2, 16))
    assert difference(ours, theirs.eval()(input_ids=input_ids).logits) < 1e-5


@pytest.mark.parametrize("case", CASES)
def test_padding_is_zero_and_cut_off_again(case: str, tmp_path: Path) -> None:
    family, options = CASES[case]
    saved(tiny_config(family, **options), tmp_path)
    config = pretrained(tmp_path, pad_vocab_to_multiple_of=64)
    weight = from_pretrained(config)("embed.weight")
    assert weight.shape == (64, 32)
    assert torch.count_nonzero(weight[61:]) == 0
    (tensor,) = to_hf(config, "embed.weight", weight).values()
    assert torch.equal(tensor, weight[:61])


def test_both_names_of_the_neox_head_are_read(tmp_path: Path) -> None:
    config = saved(tiny_config("neox"), tmp_path)
    expected = from_pretrained(config)("lm_head.weight").clone()  # older safetensors give a view of the file itself
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    tensors["lm_head.weight"] = tensors.pop("embed_out.weight")
    save_file(tensors, file)
    assert torch.equal(from_pretrained(config)("lm_head.weight"), expected)


def test_what_older_versions_saved_beside_the_weights_is_ignored(tmp_path: Path) -> None:
    config = saved(tiny_config("neox"), tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    tensors["gpt_neox.layers.0.attention.rotary_emb.inv_freq"] = torch.ones(1)
    tensors["gpt_neox.layers.0.attention.masked_bias"] = torch.ones(1)
    save_file(tensors, file)
    load_weights(tiny_model(config), from_pretrained(config))


def refusal(config: ModelConfig) -> str:
    with pytest.raises(UserError) as caught:
        from_pretrained(config)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("keep", [0, 4, 100, -1, -5000])
def test_a_truncated_file_is_named(keep: int, tmp_path: Path) -> None:
    config = saved(tiny_config("llama"), tmp_path)
    file = tmp_path / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:keep])
    message = refusal(config)
    assert str(file) in message
    if keep < 0:
        assert "tensor " in message


def test_a_truncated_shard_is_named_with_its_tensor(tmp_path: Path) -> None:
    config = saved(tiny_config("llama"), tmp_path, shard="10KB")
    file = sorted(tmp_path.glob("*.safetensors"))[1]
    tensors = list(load_file(file))
    file.write_bytes(file.read_bytes()[:-1])
    message = refusal(config)
    assert str(file) in message
    assert any(tensor in message for tensor in tensors)


def test_a_missing_shard_is_named_with_a_tensor(tmp_path: Path) -> None:
    config = saved(tiny_config("llama"), tmp_path, shard="10KB")
    file = sorted(tmp_path.glob("*.safetensors"))[1]
    tensors = list(load_file(file))
    file.unlink()
    message = refusal(config)
    assert f"{file}: no such file" in message
    assert any(tensor in message for tensor in tensors)


def test_no_weights_at_all(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(write_config(tiny_config("llama"))))
    assert f"{tmp_path / 'model.safetensors'}: no such file" in refusal(pretrained(tmp_path))


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    config = saved(tiny_config("llama"), tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    tensors.pop("model.layers.1.self_attn.k_proj.weight")
    save_file(tensors, file)
    message = refusal(config)
    assert str(tmp_path) in message
    assert "model.layers.1.self_attn.k_proj.weight" in message


def test_a_tensor_that_the_index_promises_and_no_file_has(tmp_path: Path) -> None:
    config = saved(tiny_config("llama"), tmp_path, shard="10KB")
    index = tmp_path / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["model.norm.weight"], other = sorted(set(content["weight_map"].values()))[:2]
    content["weight_map"]["model.embed_tokens.weight"] = other
    index.write_text(json.dumps(content))
    assert "is not in it, though model.safetensors.index.json says so" in refusal(config)


@pytest.mark.parametrize("content", ["{", "[]", '{"weight_map": 3}', "{}"])
def test_a_broken_index(content: str, tmp_path: Path) -> None:
    config = saved(tiny_config("llama"), tmp_path, shard="10KB")
    (tmp_path / "model.safetensors.index.json").write_text(content)
    assert "model.safetensors.index.json" in refusal(config)


def test_a_wrong_shape_is_named_with_file_and_tensor(tmp_path: Path) -> None:
    saved(tiny_config("llama"), tmp_path)
    message = refusal(pretrained(tmp_path, intermediate_size=40))
    assert str(tmp_path / "model.safetensors") in message
    assert "model.layers.0.mlp.gate_proj.weight has shape [48, 32]" in message
    assert "[40, 32]" in message


def test_a_tensor_with_no_place_is_refused(tmp_path: Path) -> None:
    saved(tiny_config("llama", attention_bias=True), tmp_path)
    message = refusal(pretrained(tmp_path, attention_bias=False))
    assert "_proj.bias has no place" in message


def test_quantised_weights_are_refused(tmp_path: Path) -> None:
    config = saved(tiny_config("llama"), tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch.int8)
    save_file(tensors, file)
    assert "model.norm.weight is I8" in refusal(config)
