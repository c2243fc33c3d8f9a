"""A config file and `--set` arguments in, a whole and resolved Config out, or every mistake at once."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from fmengine.config.architecture import option_problems, required_problems
from fmengine.config.owned import owned_problems
from fmengine.config.read import read, read_value
from fmengine.config.recipe import config_file, recipe_names
from fmengine.config.resolve import resolve
from fmengine.config.schema import Config
from fmengine.config.source import Problem, Source, problem
from fmengine.config.words import explain, show
from fmengine.errors import UserError

VERSION = 1
"""The one format of config files that this program reads."""


def load(path: Path | None, sets: Sequence[str] = ()) -> Config:
    """Read, check and resolve a config.

    Args:
        path: a file, or the name of a shipped recipe; None for the default recipe.
        sets: `a.b=value` arguments laid over the file, the value in YAML; the last one wins.

    Returns:
        A config in which no option that the model's family uses is None. Paths in it are as written:
        relative ones count from the current directory.

    Raises:
        UserError: all mistakes found, a line each, as `train.yaml:12: optimizer.lrr: no such key; ...`.
    """
    return load_with_source(path, sets)[0]


def load_with_source(path: Path | None, sets: Sequence[str] = ()) -> tuple[Config, Source]:
    """`load`, and where each key was given, for the errors of later checks."""
    file = config_file(path)
    data, source, problems = _read(file)
    problems += _lay_over(data, source, sets)
    _refuse_other_version(data, source)
    config = None
    try:
        config = Config.model_validate_json(json.dumps(data), strict=True)
    except ValidationError as error:
        problems += [explain(detail) for detail in error.errors(include_url=False)]
    model = data.get("model", {})
    if isinstance(model, dict):
        problems += option_problems(model)
        # A misspelt `family` is one mistake, not two.
        if not any(found.key[:1] == ("model",) for found in problems):
            problems += required_problems(model)
    problems += owned_problems(data.get("deepspeed", {}))
    _raise(problems, source)
    assert config is not None
    config, problems = resolve(config)
    _raise(problems, source)
    return config, source


def _raise(problems: Sequence[Problem], source: Source) -> None:
    if problems:
        unique = dict.fromkeys(sorted(problems, key=source.order))
        raise UserError([source.line(found) for found in unique])


def _read(file: Path) -> tuple[dict[str, Any], Source, list[Problem]]:
    """The file's data, where its keys stand, and its duplicate keys."""
    if not file.exists():
        recipes = ", ".join(recipe_names())
        raise UserError(f"{file}: no such file; give a config file, or the name of a shipped recipe ({recipes})")
    document = read(file)
    if document.data is None:
        raise UserError(f"{file}: holds no config; start from a shipped recipe ({', '.join(recipe_names())})")
    if not isinstance(document.data, dict):
        line = document.lines[()]
        raise UserError(f"{file}:{line}: must be sections such as `model:` and `train:`, not {show(document.data)}")
    # A section whose keys are all commented out reads as null.
    for name in [name for name, value in document.data.items() if value is None and name in Config.model_fields]:
        document.data[name] = {}
    return document.data, Source(str(file), document.lines), document.problems


def _refuse_other_version(data: dict[str, Any], source: Source) -> None:
    version = data.get("version", VERSION)
    if version != VERSION or isinstance(version, bool):
        text = f"this program reads version {VERSION}, not {show(version)}; "
        text += "start from a shipped recipe, or use the FMEngine that the file was written for"
        raise UserError(source.line(problem("version", text)))


def _lay_over(data: dict[str, Any], source: Source, sets: Sequence[str]) -> list[Problem]:
    """Write `--set` arguments into the data."""
    problems = []
    for argument in sets:
        name, equals, text = argument.partition("=")
        key = tuple(part.strip() for part in name.split("."))
        if not equals or not all(key):
            raise UserError(f"--set {argument}: must be KEY=VALUE, such as optimizer.learning_rate=1e-4")
        try:
            value = read_value(text)
        except ValueError as error:
            raise UserError(f"--set {argument}: {error}") from None
        section: Any = data
        for part in key[:-1]:
            below = section.get(part)
            section[part] = section = {} if below is None else below
            if not isinstance(section, dict):
                break
        if isinstance(section, dict):
            section[key[-1]] = value
            source.lay_over(key, argument)
        else:
            source.lay_over(key, argument)
            problems.append(Problem(key, f"{'.'.join(key[:-1])} is a value, not a section"))
    return problems
