"""Whether Transformers computes from the exported files what we compute from the checkpoint.

Layer by layer, so that it fits where training did: each of Transformers' blocks, filled from the files,
gets the same hidden state as our block, filled from the checkpoint; ours goes on to the next. The
embedding, last norm and head are compared as tensors. Where two whole models fit into memory, their
logits are compared too, through `from_pretrained`, which is what a user will do.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fmengine.config.model import ModelConfig
from fmengine.config.size import count_parameters
from fmengine.kernels.attention import dense_attention
from fmengine.models.hf import to_hf
from fmengine.models.names import ParameterName
from fmengine.models.registry import build, family_of
from fmengine.models.safetensors_folder import SafetensorsFolder
from fmengine.models.weights import WeightSource, load_weights

TOLERANCE = 1e-4
"""Largest |a - b| / |b| of a token's vector, in float32: sums in another order stay below 1e-5; a head in the
wrong place, another epsilon or another rotation are above 1e-2."""

WHOLE_MODEL_BYTES = 4 * 2**30
"""Whole models are compared where both, in float32, take no more than this."""

TOKENS = 64
"""Length of the compared sequence."""


class ExportMismatchError(RuntimeError):
    """The exported files are not the model that was trained."""


@torch.no_grad()
def check_export(
    folder: Path, config: ModelConfig, weights: WeightSource, dtype: torch.dtype, report: Callable[[str], None]
) -> None:
    """Compare an exported folder with the weights it was made of.

    Args:
        folder: the export.
        config: a resolved model config.
        weights: canonical name -> full float32 tensor.
        dtype: what the export holds; our side is rounded to it too.
        report: told one line a stage.

    Raises:
        ExportMismatchError: something differs by more than `TOLERANCE`.
    """

    def rounded(name: str) -> Tensor:
        return weights(name).to(dtype).float()

    worst = _check_blocks(folder, config, rounded)
    report(f"verified   {config.num_hidden_layers} blocks against Transformers', relative difference {worst:.0e}")
    if 2 * 4 * count_parameters(config) <= WHOLE_MODEL_BYTES:
        worst = _check_logits(folder, config, rounded)
        report(f"verified   logits of the whole model against Transformers', relative difference {worst:.0e}")
    else:
        report("verified   whole model not compared: two of it would not fit in memory")


def _check_blocks(folder: Path, config: ModelConfig, weights: WeightSource) -> float:
    files = SafetensorsFolder(folder)
    theirs = TransformersBlock(folder, config)
    length = min(TOKENS, config.max_position_embeddings or TOKENS)
    ids = _token_ids(config, length)[0]
    hidden = nn.functional.embedding(ids, weights("embed.weight"))[None]
    position_ids = torch.arange(length)[None]
    worst = 0.0
    for layer in range(config.num_hidden_layers or 0):
        ours = _our_block(config, weights, layer)(hidden, position_ids, torch.tensor([0, length], dtype=torch.int32))
        found = theirs(layer, lambda name: files.read(name).float(), hidden, position_ids)
        worst = max(worst, _compare(found, ours, f"block {layer}"))
        hidden = ours
    for name in family_of(config).parameter_shapes(config):
        if ParameterName.parse(name).layer is None:
            for hf_name, tensor in to_hf(config, name, weights(name)).items():
                if not torch.equal(files.read(hf_name).float(), tensor):
                    raise ExportMismatchError(f"{folder}: {hf_name} is not the checkpoint's {name}")
    return worst


def _our_block(config: ModelConfig, weights: WeightSource, layer: int) -> nn.Module:
    block = family_of(config).block(config, dense_attention(mask_documents=False), False).float()
    load_weights(block, lambda name: weights(f"layers.{layer}.{name}"))
    return block.eval()


class TransformersBlock:
    """One block of Transformers' model at a time, in float32 on the CPU.

    Args:
        folder: holds config.json.
        config: the model's, for its canonical names.
    """

    def __init__(self, folder: Path, config: ModelConfig) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM

        self._config = config
        hf_config = AutoConfig.from_pretrained(folder, num_hidden_layers=1)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(hf_config, dtype=torch.float32, attn_implementation="sdpa")
        base = model.base_model
        self._prefix = f"{model.base_model_prefix}.layers."
        self._block = base.layers[0].to_empty(device="cpu").eval()
        # built anew off the meta device, because its table is computed and not loaded
        self._rotary = type(base.rotary_emb)(hf_config)

    def __call__(self, layer: int, read: Callable[[str], Tensor], hidden: Tensor, position_ids: Tensor) -> Tensor:
        """Run block `layer`, filled through `read` (Hugging Face name -> tensor), on hidden [1, S, width]."""
        for name, parameter in self._block.named_parameters():
            parameter.copy_(read(f"{self._prefix}{layer}.{name}"))
        result: Any = self._block(
            hidden,
            attention_mask=None,
            position_ids=position_ids,
            position_embeddings=self._rotary(hidden, position_ids),
        )
        output: Tensor = result[0] if isinstance(result, tuple) else result
        return output


def _check_logits(folder: Path, config: ModelConfig, weights: WeightSource) -> float:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging as hf_logging

    ids = _token_ids(config, min(TOKENS, config.max_position_embeddings or TOKENS))
    had_bar = hf_logging.is_progress_bar_enabled()
    hf_logging.disable_progress_bar()  # the export says itself where it is
    theirs, loading = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    if had_bar:
        hf_logging.enable_progress_bar()
    odd = [name for kind in ("missing_keys", "unexpected_keys", "mismatched_keys") for name in loading[kind]]
    if odd:
        raise ExportMismatchError(f"{folder}: Transformers does not find its tensors: {', '.join(map(str, odd[:5]))}")
    found = theirs.eval()(ids).logits
    del theirs
    model = build(config, attention=dense_attention(mask_documents=False)).float().eval()
    load_weights(model, weights)
    bounds = torch.arange(0, ids.numel() + 1, ids.shape[1], dtype=torch.int32)
    ours = model(ids, torch.arange(ids.shape[1]).expand_as(ids), bounds)
    return _compare(found, ours, "logits")


def _token_ids(config: ModelConfig, length: int) -> Tensor:
    """Token ids [2, length], the same each time."""
    return torch.randint(config.vocab_size or 1, (2, length), generator=torch.Generator().manual_seed(0))


def _compare(found: Tensor, expected: Tensor, what: str) -> float:
    # token by token, because the first token's hidden state can be a thousand times larger than the others'
    difference = float(((found - expected).norm(dim=-1) / expected.norm(dim=-1)).max())
    # written so that a NaN fails too
    if not difference <= TOLERANCE:
        raise ExportMismatchError(
            f"{what}: Transformers computes something else from the exported files: relative difference "
            f"{difference:.1e}, {TOLERANCE:.0e} allowed; nothing was exported"
        )
    return difference
