from pathlib import Path

import pytest

from fmengine.config.dump import dump
from fmengine.config.load import load
from fmengine.config.recipe import recipe_names


@pytest.mark.parametrize("name", recipe_names())
def test_what_is_written_reads_back_equal(name: str, tmp_path: Path) -> None:
    sets = ["run.dir=no", "data.tokenizer='1e-4'", 'deepspeed={wall_clock_breakdown: true, tag: "1", x: 1e-4}']
    config = load(Path(name), sets)
    file = tmp_path / "config.yaml"
    file.write_text(dump(config))
    assert load(file) == config


def test_keys_keep_the_order_of_the_schema() -> None:
    names = [line.split(":")[0] for line in dump(load(None)).splitlines() if not line.startswith(" ")]
    assert names == list(dict.fromkeys(names))
    assert names[:4] == ["version", "run", "model", "data"]
