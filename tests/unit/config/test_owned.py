from typing import Any

import pytest

from fmengine.config.names import real_keys
from fmengine.config.owned import OWNED, owned_problems


@pytest.mark.parametrize("key", sorted(OWNED))
def test_every_owned_key_is_refused_where_it_stands(key: str) -> None:
    section: Any = 1
    for part in reversed(key.split(".")):
        section = {part: section}
    (found,) = owned_problems(section)
    assert found.key == ("deepspeed", *key.split("."))
    assert (OWNED[key] or "leave it out") in found.text


def test_what_we_point_at_is_there() -> None:
    written = {".".join(map(str, key)) for key in real_keys()}
    for ours in filter(None, OWNED.values()):
        name = ours.removeprefix("the ").removesuffix(" section")
        assert name in written


def test_everything_else_passes() -> None:
    section = {
        "zero_optimization": {"offload_optimizer": {"device": "cpu"}, "overlap_comm": True},
        "fp16": {"loss_scale": 0},
        "bf16": 3,
        "data_types": {},
        "wall_clock_breakdown": True,
        "comms_logger": {"enabled": True, "optimizer": 1},
    }
    assert owned_problems(section) == []
