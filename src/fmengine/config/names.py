"""The nearest real key to one that does not exist."""

import difflib
from functools import cache
from typing import Any, get_args

from pydantic import BaseModel

from fmengine.config.schema import Config
from fmengine.config.source import KeyPath

CLOSE = 0.7
"""Least likeness (difflib's ratio) at which a name is suggested."""

OTHER_NAMES = {
    "run.dir": "output_dir out_dir save_dir run_dir",
    "data.train": "train_data data_path train_data_paths dataset",
    "data.validation": "valid_data validation_data valid_data_paths",
    "data.sequence_length": "seq_length seq_len max_seq_length max_length block_size context_length",
    "data.tokenizer": "vocab_file tokenizer_path tokenizer_name",
    "model.pretrained": "model_name_or_path checkpoint_path",
    "model.family": "architecture model_type",
    "model.hidden_size": "dim d_model n_embd",
    "model.rope_scaling.rope_type": "type",
    "model.intermediate_size": "ffn_hidden_size ffn_dim d_ff",
    "model.num_hidden_layers": "num_layers n_layers n_layer layers",
    "model.num_attention_heads": "num_heads n_heads n_head heads",
    "model.num_key_value_heads": "num_kv_heads n_kv_heads num_query_groups",
    "model.tie_word_embeddings": "tie_embeddings no_weight_tying weight_tying",
    "batch.global_batch_size": "train_batch_size batch_size",
    "batch.micro_batch_size": "train_micro_batch_size_per_gpu per_device_train_batch_size",
    "batch.gradient_accumulation_steps": "gas grad_accum accumulation accumulation_steps",
    "parallel.zero_stage": "stage zero",
    "parallel.tensor_parallel_size": "tp tp_size tensor_model_parallel_size model_parallel_size",
    "parallel.pipeline_parallel_size": "pp pp_size pipe_parallel_size pipeline_model_parallel_size",
    "parallel.sequence_parallel_size": "sp sp_size cp context_parallel_size",
    "optimizer.learning_rate": "lr max_lr",
    "optimizer.gradient_clipping": "max_grad_norm grad_clip clip_grad",
    "schedule.shape": "lr_scheduler_type lr_decay_style scheduler",
    "schedule.warmup_steps": "warmup warmup_iters num_warmup_steps warmup_ratio",
    "schedule.min_ratio": "min_lr min_lr_ratio",
    "train.steps": "max_steps train_iters num_steps iterations",
    "train.precision": "dtype bf16 fp16 mixed_precision",
    "train.activation_checkpointing": "gradient_checkpointing checkpoint_activations recompute",
    "train.log_interval": "logging_steps",
    "train.eval_interval": "eval_steps",
    "checkpoint.interval": "save_interval save_steps checkpoint_interval",
    "checkpoint.keep": "save_total_limit keep_last",
}
"""What other trainers (Hugging Face, GPT-NeoX, Megatron-LM, DeepSpeed) call our keys."""


def sections_of(model: type[BaseModel]) -> dict[str, type[BaseModel] | None]:
    """The keys of a section, each with the section below it, or None for a value."""
    found: dict[str, type[BaseModel] | None] = {}
    for name, info in model.model_fields.items():
        kinds = [info.annotation, *get_args(info.annotation)]
        below = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)]
        found[name] = below[0] if below else None
    return found


@cache
def real_keys() -> tuple[KeyPath, ...]:
    """Every key of a config, sections before what is in them."""

    def walk(model: type[BaseModel], path: KeyPath) -> list[KeyPath]:
        keys: list[KeyPath] = []
        for name, below in sections_of(model).items():
            keys.append((*path, name))
            if below is not None:
                keys += walk(below, (*path, name))
        return keys

    return tuple(walk(Config, ()))


@cache
def _by_name() -> dict[str, list[KeyPath]]:
    """Last part of a key, or what others call it, to the keys it may mean."""
    names: dict[str, list[KeyPath]] = {}
    for key in real_keys():
        names.setdefault(str(key[-1]), []).append(key)
    for real, others in OTHER_NAMES.items():
        for name in others.split():
            names.setdefault(name, []).append(tuple(real.split(".")))
    return names


def suggestion(key: KeyPath) -> str:
    """What to say after `no such key`: the nearest real key, looked for first in the same section."""
    name, section = str(key[-1]).lower().replace("-", "_"), key[:-1]
    names = _by_name()
    here = [other for other, keys in names.items() if any(real[:-1] == section for real in keys)]
    for candidates in (here, list(names)):
        close = difflib.get_close_matches(name, candidates, n=1, cutoff=CLOSE)
        if close:
            keys = sorted(names[close[0]], key=lambda real: real[:-1] != section)
            return f"did you mean {_written(keys[0], section)}?"
    known = [str(real[-1]) for real in real_keys() if real[:-1] == section]
    return f"known here: {', '.join(known)}" if known else "leave it out"


def _written(real: KeyPath, section: KeyPath) -> str:
    parts: Any = real[-1:] if real[:-1] == section else real
    return ".".join(map(str, parts))
