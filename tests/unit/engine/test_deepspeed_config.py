"""Our config in DeepSpeed's words, read back with DeepSpeed's own classes where it has some."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from fmengine.config.batch import BatchSizes
from fmengine.config.owned import OWNED
from fmengine.config.resolve import resolve
from fmengine.config.schema import Config
from fmengine.engine.deepspeed_config import deepspeed_config, merge, tensor_parallel_section
from fmengine.models.registry import family_of
from support.models import TINY, tiny_config

SIZES = BatchSizes(global_batch_size=24, micro_batch_size=3, gradient_accumulation_steps=4)


def config(deepspeed: dict[str, Any] | None = None, precision: str = "fp32", zero_stage: int = 1) -> Config:
    resolved, problems = resolve(
        Config.model_validate(
            {
                "model": {"family": "llama", **TINY},
                "batch": {"global_batch_size": 24},
                "parallel": {"zero_stage": zero_stage},
                "optimizer": {"gradient_clipping": 0.7},
                "train": {"steps": 5, "precision": precision},
                "deepspeed": deepspeed or {},
            }
        )
    )
    assert not problems
    return resolved


def at(section: Any, dotted: str) -> Any:
    """The value of a dotted key, or None."""
    for part in dotted.split("."):
        section = section.get(part) if isinstance(section, dict) else None
    return section


def nested(dotted: str, value: Any) -> dict[str, Any]:
    for part in reversed(dotted.split(".")):
        value = {part: value}
    return value


PLAIN = deepspeed_config(config(precision="bf16"), SIZES)
"""Every key that FMEngine writes."""


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_every_key_of_ours_lands(precision: str, zero_stage: int) -> None:
    made = deepspeed_config(config(precision=precision, zero_stage=zero_stage), SIZES)
    assert made["train_batch_size"] == 24
    assert made["train_micro_batch_size_per_gpu"] == 3
    assert made["gradient_accumulation_steps"] == 4
    assert made["gradient_clipping"] == 0.7
    assert made["zero_optimization"]["stage"] == zero_stage
    assert made["bf16"] == {"enabled": precision == "bf16"}
    assert made["fp16"] == {"enabled": precision == "fp16"}
    assert at(made, "data_types.grad_accum_dtype") == ("fp32" if precision == "bf16" else None)
    assert made["steps_per_print"] > 10**9
    assert made["zero_allow_untested_optimizer"] is True
    assert made["zero_force_ds_cpu_optimizer"] is False


def test_nothing_is_written_that_is_not_known_as_ours_or_a_default() -> None:
    """A key that this function writes and `config.owned` does not know could be overwritten by a user in silence."""

    def leaves(section: dict[str, Any], before: str = "") -> set[str]:
        found = set()
        for key, value in section.items():
            found |= leaves(value, f"{before}{key}.") if isinstance(value, dict) else {before + key}
        return found

    written = leaves(deepspeed_config(config(precision="bf16"), SIZES))
    assert written - {"zero_optimization.memory_efficient_linear"} <= OWNED.keys()


def test_deepspeed_reads_it_as_meant() -> None:
    from deepspeed.runtime.config import DeepSpeedConfig

    made = deepspeed_config(config(precision="bf16", zero_stage=2), SIZES)
    read = DeepSpeedConfig(made | {"train_batch_size": 12})  # this process is one replica, not the two of SIZES
    assert read.train_micro_batch_size_per_gpu == 3
    assert read.gradient_accumulation_steps == 4
    assert read.gradient_clipping == 0.7
    assert read.zero_optimization_stage == 2
    assert read.bfloat16_config.enabled
    assert not read.float16_config.enabled
    assert read.grad_accum_dtype == "fp32"
    assert read.zero_allow_untested_optimizer


def test_foreign_keys_pass_through_beside_ours() -> None:
    section = {
        "wall_clock_breakdown": True,
        "zero_optimization": {"overlap_comm": True, "offload_optimizer": {"device": "cpu"}},
        "fp16": {"initial_scale_power": 8},
        "a_key_of_tomorrow": {"deep": [1, {"x": None}]},
    }
    made = deepspeed_config(config(section, precision="fp16", zero_stage=2), SIZES)
    assert made["wall_clock_breakdown"] is True
    assert made["zero_optimization"] == {
        "memory_efficient_linear": False,
        "stage": 2,
        "overlap_comm": True,
        "offload_optimizer": {"device": "cpu"},
    }
    assert made["fp16"] == {"enabled": True, "initial_scale_power": 8}
    assert made["a_key_of_tomorrow"] == {"deep": [1, {"x": None}]}


def test_a_default_of_ours_gives_way() -> None:
    made = deepspeed_config(config({"zero_optimization": {"memory_efficient_linear": True}}), SIZES)
    assert made["zero_optimization"] == {"memory_efficient_linear": True, "stage": 1}


@pytest.mark.parametrize("key", sorted(key for key in OWNED if at(PLAIN, key) is not None))
def test_a_section_cannot_override_a_key_of_ours(key: str) -> None:
    """Such a config is refused when it is loaded; should one come here all the same, what FMEngine writes wins."""
    assert deepspeed_config(config(nested(key, "theirs"), precision="bf16"), SIZES) == PLAIN


@pytest.mark.parametrize("key", sorted(OWNED))
def test_it_is_refused_when_loaded(key: str, tmp_path: Path) -> None:
    from fmengine.config.load import load
    from fmengine.errors import UserError

    file = tmp_path / "train.yaml"
    values = {"model": {"family": "llama", **TINY}, "deepspeed": nested(key, 1)}
    file.write_text(json.dumps(values))  # JSON is YAML
    with pytest.raises(UserError, match=rf"deepspeed\.{re.escape(key)}: FMEngine sets this itself"):
        load(file)


def test_the_config_is_left_as_it_was_and_made_anew_each_time() -> None:
    section = {"zero_optimization": {"overlap_comm": True}}
    given = config(section)
    first = deepspeed_config(given, SIZES)
    first["zero_optimization"]["overlap_comm"] = "changed"
    first["zero_optimization"]["memory_efficient_linear"] = "changed"
    assert given.deepspeed == {"zero_optimization": {"overlap_comm": True}}
    assert deepspeed_config(given, SIZES)["zero_optimization"] == {
        "memory_efficient_linear": False,
        "overlap_comm": True,
        "stage": 1,
    }


def test_merge_goes_leaf_by_leaf() -> None:
    assert merge({"a": {"b": 1, "c": 2}, "d": 3}, {"a": {"b": 9}, "d": {"e": 4}}) == {
        "a": {"b": 9, "c": 2},
        "d": {"e": 4},
    }


@pytest.mark.parametrize("vocabulary_parallel", [False, True])
@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {"num_key_value_heads": 2}),
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("llama", {"tie_word_embeddings": True}),
        ("neox", {}),
    ],
)
def test_autotp_accepts_the_tensor_plan_and_cuts_what_it_says(
    family: str, options: dict[str, Any], vocabulary_parallel: bool
) -> None:
    """Every entry becomes a TPLayerSpec, and each parameter is matched by the one of its entry or by none."""
    from deepspeed.module_inject.autotp_config import AutoTPConfig, PartitionType, TPLayerSpec
    from deepspeed.runtime.tensor_parallel.config import TPTrainingConfig

    from fmengine.models.tensor_plan import find_entry

    model = tiny_config(family, **options)
    plan = family_of(model).tensor_plan(model, vocabulary_parallel=vocabulary_parallel)
    section = tensor_parallel_section(plan, 2)
    assert TPTrainingConfig(**section).autotp_size == 2
    theirs = AutoTPConfig.from_dict(section["partition_config"])
    assert not theirs.use_default_specs
    assert len(theirs.layer_specs) == len(plan)
    kinds = {"column": PartitionType.COLUMN, "row": PartitionType.ROW}
    cut = set()
    for name in family_of(model).parameter_shapes(model):
        entry = find_entry(plan, name)
        for prefix in ("", "module."):
            spec = theirs.find_matching_spec(prefix + name)
            if entry.kind == "replicated":
                assert spec is None, name
                continue
            cut.add(name)
            assert isinstance(spec, TPLayerSpec), name
            assert spec.partition_type is kinds[entry.kind]
            assert spec.get_partition_dim() == (0 if entry.kind == "column" else 1)
            assert spec.get_sub_param_sizes() == entry.sizes
    assert {"layers.0.attn.qkv.weight", "layers.1.mlp.down.weight"} <= cut
    head = "embed.weight" if options.get("tie_word_embeddings") else "lm_head.weight"
    assert (head in cut) == vocabulary_parallel
