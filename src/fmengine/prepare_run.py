"""What rank 0 does before the others are met: the run folder, the data, and where training goes on from.

Nothing here is collective: a full disk, a broken checkpoint or a long conversion happens to one process, before any
other can time out waiting for it.
"""

import itertools
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from fmengine.checkpoint.files import write_atomic
from fmengine.checkpoint.find import CHECKPOINTS, find_newest
from fmengine.checkpoint.manifest import Layout, Manifest, check_model, layout_changes, read
from fmengine.checkpoint.store import convert
from fmengine.config.batch import BatchSizes
from fmengine.config.dump import dump
from fmengine.config.schema import Config
from fmengine.data.loader import samples_per_epoch
from fmengine.errors import UserError

log = logging.getLogger(__name__)

DATA, TOKENIZER, CONFIG, CONVERTED, METRICS = "data", "tokenizer", "config.yaml", "converted", "metrics.jsonl"


@dataclass(frozen=True)
class Start:
    """How a run starts; the same on every rank.

    Attributes:
        config: with the data and tokenizer filled in.
        checkpoint: the checkpoint to go on from, or None.
        store: its state as a per-parameter store, where it was written at another layout.
        step: optimizer steps taken so far.
    """

    config: Config
    checkpoint: Path | None
    store: Path | None
    step: int


def prepare_run(
    config: Config, sizes: BatchSizes, world_size: int, *, fresh: bool, say: Callable[[str], None]
) -> Start:
    """Make the run folder ready and decide where the run starts.

    Args:
        config: resolved and checked; its run folder is owned by this process.
        sizes: the solved batch triangle.
        world_size: ranks of the run.
        fresh: put older checkpoints aside and start over.
        say: tells the user what takes a while.

    Raises:
        UserError: no data, a tokenizer without an end token, or a checkpoint that this config cannot go on from.
        OSError: the disk refuses.
    """
    run_dir = config.run.dir
    if fresh:
        _put_aside(run_dir)
    config = _with_data(config, say)
    newest = find_newest(run_dir, full=True)
    start = Start(config, None, None, 0) if newest is None else _resume(config, sizes, world_size, newest, say)
    write_atomic(run_dir / CONFIG, dump(config))
    return start


def _put_aside(run_dir: Path) -> None:
    checkpoints = run_dir / CHECKPOINTS
    if checkpoints.exists():
        name = f"{CHECKPOINTS}-until-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}"
        aside = run_dir / name
        for number in itertools.count(2):
            if not aside.exists():
                break
            aside = run_dir / f"{name}-{number}"
        checkpoints.rename(aside)
        if (run_dir / METRICS).exists():  # else a fresh start would cut off what was measured
            (run_dir / METRICS).rename(aside / METRICS)
        log.warning("starting over: the older checkpoints are now in %s; remove it when you need the room", aside)


def _with_data(config: Config, say: Callable[[str], None]) -> Config:
    """Fill in the default corpus where none is given, and copy the tokenizer into the run folder for the export."""
    from fmengine.data.default import prepare_default
    from fmengine.data.tokenizer import copy_tokenizer, end_of_document, load_tokenizer

    data, run_dir = config.data, config.run.dir
    if data.train is None:
        say("no data.train: training on the Python standard library's source, tokenized now or found in the run folder")
        made = prepare_default(run_dir / DATA, config.model.vocab_size or 0)
        data = data.model_copy(update={"train": made.prefix, "tokenizer": made.tokenizer})
    if data.tokenizer is not None:
        end_token, _ = end_of_document(load_tokenizer(data.tokenizer), data.tokenizer)
        copy_tokenizer(data.tokenizer, run_dir / TOKENIZER, end_token)
    return config.model_copy(update={"data": data})


def _resume(config: Config, sizes: BatchSizes, world_size: int, checkpoint: Path, say: Callable[[str], None]) -> Start:
    manifest = read(checkpoint)
    check_model(manifest, config.model, checkpoint)
    _check_order(manifest, config, sizes, checkpoint)
    _log_changes(manifest, config)
    if manifest.step >= config.train.steps:
        return Start(config, checkpoint, None, manifest.step)
    changes = layout_changes(manifest.layout, Layout.of(config, world_size))
    store = None
    if changes:
        said = ", ".join(f"{change.key} {change.saved} -> {change.wanted}" for change in changes)
        say(f"{checkpoint.name} was written at another layout ({said}): converting it")
        store = config.run.dir / CONVERTED / checkpoint.name
        store.parent.mkdir(exist_ok=True)
        convert(checkpoint, store)
    return Start(config, checkpoint, store, manifest.step)


def _check_order(manifest: Manifest, config: Config, sizes: BatchSizes, checkpoint: Path) -> None:
    """What fixes the order of the samples must stay, or samples would be repeated and left out in silence."""
    saved = manifest.config
    wanted = {
        "run.seed": (saved["run"]["seed"], config.run.seed),
        "data.sequence_length": (saved["data"]["sequence_length"], config.data.sequence_length),
        "batch.global_batch_size": (manifest.samples // manifest.step, sizes.global_batch_size),
    }
    problems = [
        f"{key}: {now}, but {checkpoint} was trained with {before}, and the order of the samples hangs on it; "
        f"set it to {before}, or choose another run.dir"
        for key, (before, now) in wanted.items()
        if before != now
    ]
    before, now = manifest.rng.get("samples_per_epoch"), samples_per_epoch(config.data)
    if not problems and before not in (None, now):
        problems = [
            f"data: {now} samples in an epoch, but {checkpoint} was trained with {before}; give the data back, "
            "data.validation and data.validation_fraction too, or choose another run.dir"
        ]
    if problems:
        raise UserError(problems)


def _log_changes(manifest: Manifest, config: Config) -> None:
    now = config.model_dump(mode="json")
    for section, values in manifest.config.items():
        if isinstance(values, dict):
            for key, before in values.items():
                if key in now[section] and now[section][key] != before:
                    log.info("changed since the checkpoint: %s.%s %s -> %s", section, key, before, now[section][key])
