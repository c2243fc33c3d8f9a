"""What a config names on disk: inputs that must be there and be whole, a run folder that must take the output."""

import glob
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from fmengine.config.resolve import tokenizer_size
from fmengine.config.schema import Config
from fmengine.config.size import checkpoint_bytes, human
from fmengine.config.source import Problem, problem
from fmengine.errors import UserError

if TYPE_CHECKING:
    from fmengine.data.tokens import TokenReader


def input_problems(config: Config) -> list[Problem]:
    """Data, tokenizer and pretrained weights that are missing, broken or too small."""
    return _data_problems(config) + _tokenizer_problems(config) + _pretrained_problems(config)


def _data_problems(config: Config) -> list[Problem]:
    from fmengine.data.tokens import TokenReader

    found = []
    needed = config.data.sequence_length + 1
    for name, prefix in (("train", config.data.train), ("validation", config.data.validation)):
        if prefix is None:
            continue
        try:
            reader = TokenReader(prefix)
        except UserError as error:
            found += [problem(f"data.{name}", text) for text in error.problems]
            continue
        except OSError as error:
            found.append(problem(f"data.{name}", f"{error.filename or prefix}: {error.strerror}"))
            continue
        if reader.num_tokens < needed:
            text = f"{prefix} holds {reader.num_tokens} tokens, a sample needs {needed}"
            found.append(problem(f"data.{name}", f"{text}; add text or shorten data.sequence_length"))
        elif name == "train" and config.data.validation is None and config.data.validation_fraction:
            found += _split_problems(reader, config.data.validation_fraction, needed)
    return found


def _split_problems(reader: "TokenReader", fraction: float, needed: int) -> list[Problem]:
    """A held-out share that cannot be taken, or leaves less than a sample on one side."""
    from fmengine.data.loader import split_documents  # torch, and only wanted here

    try:
        parts = split_documents(reader, fraction)
    except UserError as error:
        return [problem("data.validation_fraction", text.partition(": ")[2]) for text in error.problems]
    found = []
    for name, part in zip(("training", "held-out"), parts, strict=True):
        tokens = reader.document_start(part.stop) - reader.document_start(part.start)
        if tokens < needed:
            text = f"the {len(part)} {name} documents hold {tokens} tokens, a sample needs {needed}; change it"
            found.append(problem("data.validation_fraction", f"{text} or shorten data.sequence_length"))
    return found


def _tokenizer_problems(config: Config) -> list[Problem]:
    if config.data.tokenizer is None:
        return []
    try:
        size = tokenizer_size(config.data.tokenizer)
    except UserError as error:
        return [problem("data.tokenizer", text) for text in error.problems]
    vocabulary = config.model.vocab_size or 0
    if size <= vocabulary:
        return []
    text = f"{vocabulary}, but {config.data.tokenizer} has ids up to {size - 1}; set it to {size} or leave it out"
    return [problem("model.vocab_size", text)]


def _pretrained_problems(config: Config) -> list[Problem]:
    """Weights whose headers do not say what the architecture needs; no tensor is read."""
    if config.model.pretrained is None:
        return []
    from fmengine.models.weights import from_pretrained  # torch, and only wanted here

    try:
        from_pretrained(config.model)
    except UserError as error:
        return [problem("model.pretrained", text) for text in error.problems]
    return []


def output_problems(config: Config) -> list[Problem]:
    """A run folder that cannot be made or written, or a disk with no room for the checkpoints.

    Nothing is made: the nearest folder that exists is tried with a file that has no name.
    """
    run = config.run.dir
    if glob.escape(str(run)) != str(run):
        text = f"{run}: DeepSpeed looks for its checkpoints by a pattern, so without *, ? and [; choose another name"
        return [problem("run.dir", text)]
    folder = run.absolute()
    try:
        while not folder.exists() and folder != folder.parent:
            folder = folder.parent
    except OSError as error:  # a name that is too long
        return [problem("run.dir", f"{error.strerror}; choose another")]
    if not folder.is_dir():
        return [problem("run.dir", f"{folder} is a file, not a folder; choose another")]
    try:
        with tempfile.TemporaryFile(dir=folder) as probe:
            probe.write(b"\0")
    except OSError as error:
        text = f"cannot write in {folder}: {error.strerror}; choose a folder that you may write to, with room"
        return [problem("run.dir", text)]
    return _room_problems(config, folder)


def _room_problems(config: Config, folder: Path) -> list[Problem]:
    """One checkpoint more than are kept must fit: the old one goes only after the new one is whole."""
    one, count = checkpoint_bytes(config.model, config.train), config.checkpoint.keep + 1
    there = sum(file.stat().st_size for file in (config.run.dir / "checkpoints").rglob("*") if file.is_file())
    free = shutil.disk_usage(folder).free
    if one * count <= free + there:
        return []
    text = (
        f"{human(free)} free at {folder}, but {count} checkpoints of {human(one)} (checkpoint.keep and the one "
        f"being written) take {human(one * count)}; choose another folder or keep fewer"
    )
    return [problem("run.dir", text)]
