import tomllib
from pathlib import Path

import pytest

from fmengine.doctor.expected import VARIANTS, expected, requirements, unfit
from fmengine.doctor.probes import PROBES
from fmengine.start.variants import VARIANTS as IMAGES

ROOT = Path(__file__).resolve().parents[3]


def test_every_variant_has_its_table() -> None:
    assert set(VARIANTS) == set(IMAGES)


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_name_is_a_probe(variant: str) -> None:
    assert set(VARIANTS[variant]) <= set(PROBES)
    assert len(set(VARIANTS[variant])) == len(VARIANTS[variant])


def test_every_requirement_has_a_probe() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found = requirements(project["dependencies"])
    assert len(found) == len(project["dependencies"]), "a package of pyproject.toml that no probe looks at"
    assert set(found) <= expected(None)
    assert all(set(found) <= set(names) for names in VARIANTS.values())


def test_extras_and_other_systems_are_not_required() -> None:
    lines = [
        'numpy>=2 ; extra == "dev"',
        'rich ; sys_platform == "win32"',
        'torch<3,>=2.10 ; python_version > "3"',
        "other",
    ]
    assert requirements(lines) == {"torch": "torch<3,>=2.10"}


def test_an_unknown_variant_needs_the_base() -> None:
    assert "torch" in expected("rocm")
    assert "flash-attn" not in expected("rocm")
    assert "flash-attn" in expected("cuda13")
    assert "flash-attn" not in expected("cpu")


def test_versions() -> None:
    assert not unfit("torch>=2.10", "2.13.0+cpu")
    assert not unfit("torch>=2.10", "2.14.0a0+git1")
    assert unfit("torch>=2.10", "2.9.1")
    assert not unfit("rich", "1")
