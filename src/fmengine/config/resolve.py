"""From what a config says to what it means: defaults of the family, the pretrained model's numbers, the vocabulary."""

from pathlib import Path
from typing import Any

from pydantic import ValidationError

from fmengine.config.architecture import (
    option_problems,
    required_problems,
    shape_problems,
    width_problems,
)
from fmengine.config.model import FAMILY_OPTIONS, ModelConfig
from fmengine.config.schema import Config
from fmengine.config.source import Problem, dotted, problem
from fmengine.config.words import explain, show
from fmengine.errors import UserError

NOT_ARCHITECTURE = {"pretrained", "pad_vocab_to_multiple_of"}
"""Keys of `model:` that config.json does not know."""


def resolve(config: Config) -> tuple[Config, list[Problem]]:
    """The config with every option that its family uses filled in, and what is wrong with it.

    Reads config.json of `model.pretrained` and tokenizer.json where the vocabulary's size is not given.
    With problems the returned config is the one that came in.
    """
    model = config.model.model_dump(exclude_none=True)
    data = config.data
    found = required_problems(model)
    if config.model.pretrained is not None:
        if data.tokenizer is None and (config.model.pretrained / "tokenizer.json").is_file():
            data = data.model_copy(update={"tokenizer": config.model.pretrained})
        found += _add_pretrained(model, config.model.pretrained)
    if found:
        return config, found
    found = option_problems(model) + width_problems(model)
    model = with_defaults(model)
    if model.get("vocab_size") is None:
        found += _add_vocabulary(model, data.tokenizer)
    model.setdefault("max_position_embeddings", data.sequence_length)
    resolved = ModelConfig.model_validate(model)
    found = found or shape_problems(resolved)
    return (config if found else config.model_copy(update={"model": resolved, "data": data})), found


def with_defaults(model: dict[str, Any]) -> dict[str, Any]:
    """A `model:` section with its family's defaults where it says nothing."""
    filled = dict(model)
    for name, default in FAMILY_OPTIONS[model["family"]].items():
        if filled.get(name) is None:
            filled[name] = default(filled) if callable(default) else default
    return filled


def tokenizer_size(tokenizer: Path) -> int:
    """Rows an embedding needs for a tokenizer: its largest id and one.

    Raises:
        UserError: no such file, or no tokenizer in it.
    """
    from fmengine.data.tokenizer import load_tokenizer, vocab_size  # a third of a second, and only wanted here

    return vocab_size(load_tokenizer(tokenizer))


def _add_vocabulary(model: dict[str, Any], tokenizer: Path | None) -> list[Problem]:
    if tokenizer is None:
        return [problem("model.vocab_size", "needed here, and not given (or give data.tokenizer)")]
    try:
        model["vocab_size"] = tokenizer_size(tokenizer)
    except UserError as error:
        return [problem("data.tokenizer", text) for text in error.problems]
    return []


def _add_pretrained(model: dict[str, Any], folder: Path) -> list[Problem]:
    """Take the architecture from a Hugging Face folder; a key given beside it must say the same."""
    from fmengine.models.hf import read_config

    try:
        read = ModelConfig.model_validate(read_config(folder)).model_dump(exclude_none=True)
    except UserError as error:
        return [problem("model.pretrained", text) for text in error.problems]
    except ValidationError as error:
        wrong = [explain(detail) for detail in error.errors(include_url=False)]
        return [problem("model.pretrained", f"{folder / 'config.json'}: {dotted(w.key)}: {w.text}") for w in wrong]
    pretrained = with_defaults({name: value for name, value in read.items() if name not in NOT_ARCHITECTURE})
    found = []
    for name, value in model.items():
        if name not in NOT_ARCHITECTURE and value != pretrained.get(name):
            text = f"{show(value)} here, but {show(pretrained.get(name))} in {folder / 'config.json'}; leave it out"
            found.append(problem(f"model.{name}", text))
    model.update(pretrained)
    return found
