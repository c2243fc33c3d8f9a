import pytest

from fmengine.config.names import OTHER_NAMES, real_keys, suggestion


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("optimizer.lrr", "learning_rate"),
        ("optimizer.lr", "learning_rate"),
        ("train.lr", "optimizer.learning_rate"),
        ("learning_rate", "optimizer.learning_rate"),
        ("train.learning_rte", "optimizer.learning_rate"),
        ("optimizer.learning-rate", "learning_rate"),
        ("optimizer.weight_dcay", "weight_decay"),
        ("optimiser", "optimizer"),
        ("train.max_steps", "steps"),
        ("model.n_layers", "num_hidden_layers"),
        ("model.rope_scaling.type", "rope_type"),
        ("data.seed", "run.seed"),
    ],
)
def test_the_nearest_key_is_named(key: str, meant: str) -> None:
    assert suggestion(tuple(key.split("."))) == f"did you mean {meant}?"


def test_without_a_near_key_those_of_the_section_are_listed() -> None:
    assert suggestion(("checkpoint", "zzzz")) == "known here: interval, keep"


def test_every_suggestion_is_a_real_key() -> None:
    written = {".".join(map(str, key)) for key in real_keys()}
    assert set(OTHER_NAMES) <= written
    assert "model.rope_scaling.factor" in written


def test_no_other_name_is_itself_a_key_of_its_section() -> None:
    for real, others in OTHER_NAMES.items():
        section = tuple(real.split(".")[:-1])
        assert not [name for name in others.split() if (*section, name) in real_keys()]
