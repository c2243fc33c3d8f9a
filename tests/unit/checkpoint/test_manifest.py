import pytest

from fmengine.checkpoint.manifest import Layout, LayoutChange, check_model, complete, layout_changes, read
from fmengine.errors import UserError
from support.checkpoints import MODEL, header


def test_another_model_names_the_keys(tmp_path) -> None:
    manifest = complete(header(1), {})
    check_model(manifest, MODEL, tmp_path)
    check_model(manifest, MODEL.model_copy(update={"max_position_embeddings": 4096}), tmp_path)
    other = MODEL.model_copy(update={"hidden_size": 16, "rope_theta": 5e5})
    with pytest.raises(UserError) as caught:
        check_model(manifest, other, tmp_path)
    text = str(caught.value)
    assert "checkpoint of another model" in text
    assert "model.hidden_size is 8 there and 16 here" in text
    assert "model.rope_theta is None there and 500000.0 here" in text
    assert "num_hidden_layers" not in text


def test_padding_of_the_vocabulary_makes_another_model(tmp_path) -> None:
    with pytest.raises(UserError, match=r"model\.pad_vocab_to_multiple_of is 1 there and 64 here"):
        check_model(complete(header(1), {}), MODEL.model_copy(update={"pad_vocab_to_multiple_of": 64}), tmp_path)


def test_layout_changes() -> None:
    saved = Layout(world_size=2, zero_stage=1, precision="bf16")
    assert layout_changes(saved, saved) == ()
    wanted = saved.model_copy(update={"zero_stage": 3, "tensor": 2})
    assert layout_changes(saved, wanted) == (
        LayoutChange(key="tensor", saved=1, wanted=2),
        LayoutChange(key="zero_stage", saved=1, wanted=3),
    )


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "not a checkpoint manifest"),
        ("[]", "not a checkpoint manifest"),
        ("{}", "not a checkpoint manifest"),
        ('{"format_version": 3}', "format_version 3"),
        ('{"format_version": 1}', "step: Field required"),
    ],
)
def test_broken_manifest(tmp_path, text: str, reason: str) -> None:
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(UserError, match=reason):
        read(tmp_path)


def test_missing_manifest(tmp_path) -> None:
    with pytest.raises(UserError, match="No such file"):
        read(tmp_path)
