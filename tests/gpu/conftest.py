"""Tests of a GPU machine; `make gpu-test` runs them. Where there is no GPU they fail, they are never skipped."""

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def gpu():
    assert torch.cuda.is_available(), "tests/gpu needs a GPU; `make test` is the command for a machine without one"
