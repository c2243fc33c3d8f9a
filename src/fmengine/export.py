"""A checkpoint as a folder that Hugging Face Transformers loads, written one shard at a time.

It is staged beside its place, compared with Transformers' own computation, and renamed last: a folder
that is there has passed.
"""

import contextlib
import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fmengine.checkpoint.files import fsync, list_files, list_folders, remove_tree
from fmengine.checkpoint.find import resolve, run_of, verify
from fmengine.checkpoint.manifest import ENGINE
from fmengine.checkpoint.reader import open_state
from fmengine.checkpoint.tensors import save_tensors
from fmengine.config.model import ModelConfig
from fmengine.config.size import human
from fmengine.errors import UserError
from fmengine.export_check import check_export
from fmengine.models.hf import hf_names, to_hf, write_config
from fmengine.models.registry import family_of
from fmengine.models.weights import WeightSource

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
MAX_SHARD_SIZE = 5 * 10**9
"""Bytes in a file; Transformers' own `save_pretrained` splits at 5 GB (its default before version 5)."""

Report = Callable[[str], None]


def export(
    checkpoint_or_run: Path,
    out: Path,
    *,
    dtype: str = "bfloat16",
    max_shard_size: int = MAX_SHARD_SIZE,
    verify_result: bool = True,
    force: bool = False,
    report: Report = print,
) -> None:
    """Write a checkpoint's model and its tokenizer for Transformers.

    Args:
        checkpoint_or_run: a checkpoint, or a run folder for its newest whole one.
        out: folder to make; it must be empty or missing unless `force`, which replaces a model's folder.
        dtype: a key of `DTYPES`.
        max_shard_size: bytes in a safetensors file; a larger tensor has a file of its own.
        verify_result: compare with Transformers before the folder appears.
        force: replace what is at `out`.
        report: told one line a stage.

    Raises:
        UserError: no whole checkpoint, a full disk, or `out` is not empty. Nothing is left behind.
        RuntimeError: Transformers computes something else. Nothing is left behind.
    """
    checkpoint = resolve(checkpoint_or_run)
    _check_target(out, force)
    manifest = verify(checkpoint, full=False)
    report(f"reading    {checkpoint}, step {manifest.step}: {human(sum(f.bytes for f in manifest.files.values()))}")
    state = open_state(checkpoint / ENGINE, manifest)
    tokenizer = run_of(checkpoint) / "tokenizer"
    export_weights(
        manifest.model,
        state.weight,
        tokenizer if tokenizer.is_dir() else None,
        out,
        dtype=dtype,
        max_shard_size=max_shard_size,
        verify_result=verify_result,
        force=force,
        report=report,
    )


def export_weights(
    config: ModelConfig,
    weights: WeightSource,
    tokenizer: Path | None,
    out: Path,
    *,
    dtype: str = "bfloat16",
    max_shard_size: int = MAX_SHARD_SIZE,
    verify_result: bool = True,
    force: bool = False,
    report: Report = print,
) -> None:
    """`export` from any source of weights.

    Args:
        config: a resolved model config.
        weights: canonical name -> full float32 tensor; asked for one at a time.
        tokenizer: folder to copy, or None.
        out: as in `export`.
        dtype: as in `export`.
        max_shard_size: as in `export`.
        verify_result: as in `export`.
        force: as in `export`.
        report: as in `export`.
    """
    _check_target(out, force)
    staging = out.with_name(f".{out.name}.staging")
    try:
        remove_tree(staging)
        staging.mkdir(parents=True)
        _write_metadata(staging, config, tokenizer, dtype, report)
        _write_shards(staging, config, weights, DTYPES[dtype], max_shard_size, report)
        if verify_result:
            check_export(staging, config, weights, DTYPES[dtype], report)
        _publish(staging, out)
    except BaseException as error:
        with contextlib.suppress(OSError):  # of a folder that refuses everything
            remove_tree(staging)
        if not isinstance(error, OSError):
            raise
        raise UserError(f"{error.filename or out}: {error.strerror or error}; nothing was exported") from error
    report(f"exported   {out}" + ("" if verify_result else " (not verified)"))


def _check_target(out: Path, force: bool) -> None:
    if out.exists() and not out.is_dir():
        raise UserError(f"{out}: is a file; give a folder")
    if out.is_dir() and any(out.iterdir()) and not force:
        raise UserError(f"{out}: not empty; give another folder, or --force to replace it")
    if out.is_dir() and any(out.iterdir()) and not (out / "config.json").is_file():
        raise UserError(f"{out}: holds no model, so --force does not replace it; give another folder")


@dataclass(frozen=True)
class _Shard:
    """The canonical parameters of one file, and how many bytes they are there."""

    names: tuple[str, ...]
    size: int


def _plan(config: ModelConfig, dtype: torch.dtype, max_shard_size: int) -> list[_Shard]:
    """Parameters in order, packed into files up to the limit; from the shapes alone."""
    shards: list[_Shard] = []
    names: tuple[str, ...] = ()
    size = 0
    for name, shape in family_of(config).parameter_shapes(config).items():
        added = dtype.itemsize * sum(prod(part) for part in hf_names(config, name, shape).values())
        if names and size + added > max_shard_size:
            shards.append(_Shard(names, size))
            names, size = (), 0
        names, size = (*names, name), size + added
    return [*shards, _Shard(names, size)]


def _write_shards(
    folder: Path, config: ModelConfig, weights: WeightSource, dtype: torch.dtype, max_shard_size: int, report: Report
) -> None:
    shards = _plan(config, dtype, max_shard_size)
    places: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        single = len(shards) == 1
        file = "model.safetensors" if single else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        tensors = dict(_tensors(config, weights, shard.names, dtype))
        save_tensors(tensors, folder / file)
        places |= dict.fromkeys(tensors, file)
        report(f"writing    {file}: {len(tensors)} tensors, {human(shard.size)}")
        del tensors
    if len(shards) > 1:
        index = {"metadata": {"total_size": sum(shard.size for shard in shards)}, "weight_map": places}
        _write_json(folder / "model.safetensors.index.json", index)


def _tensors(
    config: ModelConfig, weights: WeightSource, names: tuple[str, ...], dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    for name in names:
        for hf_name, tensor in to_hf(config, name, weights(name)).items():
            # always a copy of its own: a shard must not hold on to the float32 or to padding
            yield hf_name, tensor.detach().to(dtype, copy=True, memory_format=torch.contiguous_format)


def _write_metadata(folder: Path, config: ModelConfig, tokenizer: Path | None, dtype: str, report: Report) -> None:
    tokens = {} if tokenizer is None else special_tokens(tokenizer)
    _write_json(folder / "config.json", write_config(config) | tokens | {"dtype": dtype, "torch_dtype": dtype})
    if tokenizer is None:
        report("tokenizer  the run has none: the export is without one")
        return
    if tokens:
        _write_json(folder / "generation_config.json", tokens)
    shutil.copytree(tokenizer, folder, dirs_exist_ok=True)
    report(f"tokenizer  {', '.join(list_files(tokenizer))}")


def special_tokens(tokenizer: Path) -> dict[str, int]:
    """bos_token_id, eos_token_id and pad_token_id as far as a tokenizer's folder names such tokens."""
    from fmengine.data.tokenizer import CONFIG, load_tokenizer

    path = tokenizer / CONFIG
    config = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    known = load_tokenizer(tokenizer)
    found = {}
    for kind in ("bos", "eos", "pad"):
        token = config.get(f"{kind}_token")
        number = known.token_to_id(token["content"] if isinstance(token, dict) else token) if token else None
        if number is not None:
            found[f"{kind}_token_id"] = number
    return found


def _publish(staging: Path, out: Path) -> None:
    for name in list_files(staging):
        fsync(staging / name)
    for folder in list_folders(staging):
        fsync(folder)
    remove_tree(out)
    staging.rename(out)
    fsync(out.parent)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
