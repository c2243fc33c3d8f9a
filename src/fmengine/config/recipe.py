"""The configs that are shipped with the program, found by name."""

from pathlib import Path

import fmengine

DEFAULT = "default"


def recipe_folder() -> Path:
    """Where the shipped configs lie; package data, always a real folder."""
    return Path(fmengine.__file__).parent / "recipes"


def recipe_names() -> list[str]:
    """Names of the shipped configs."""
    return sorted(path.stem for path in recipe_folder().glob("*.yaml"))


def config_file(path: Path | None) -> Path:
    """The file that an argument means: none is the default recipe, a bare name that is no file is a recipe's."""
    name = DEFAULT if path is None else str(path)
    if path is not None and (path.exists() or name not in recipe_names()):
        return path
    return recipe_folder() / f"{name}.yaml"
