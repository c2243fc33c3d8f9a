from pathlib import Path

import pytest


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """An empty run folder."""
    folder = tmp_path / "run"
    folder.mkdir()
    return folder
