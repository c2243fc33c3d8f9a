from pathlib import Path

import pytest

from fmengine.config.check import schedule_problems
from fmengine.config.layout import layout_problems
from fmengine.config.load import load
from fmengine.config.recipe import config_file, recipe_folder, recipe_names

WORLD_SIZES = {"default": 1, "llama-7b": 64, "llama-3-8b": 64, "pythia-1.4b": 64, "gpt-neox-20b": 128}
"""Ranks on which each recipe must run."""


def test_every_recipe_is_tested() -> None:
    assert set(recipe_names()) == set(WORLD_SIZES)


@pytest.mark.parametrize("name", sorted(WORLD_SIZES))
def test_a_recipe_loads_and_its_numbers_fit(name: str) -> None:
    config = load(Path(name))
    assert layout_problems(config, WORLD_SIZES[name]) == []
    assert schedule_problems(config) == []


@pytest.mark.parametrize("name", sorted(set(WORLD_SIZES) - {"default"}))
def test_a_recipe_of_a_published_model_cites_its_source(name: str) -> None:
    assert "arXiv:" in (recipe_folder() / f"{name}.yaml").read_text().split("version:")[0]


def test_a_file_of_a_recipes_name_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert config_file(Path("llama-7b")) == recipe_folder() / "llama-7b.yaml"
    Path("llama-7b").write_text("")
    assert config_file(Path("llama-7b")) == Path("llama-7b")
    assert config_file(Path("x.yaml")) == Path("x.yaml")
    assert config_file(None) == recipe_folder() / "default.yaml"
