"""Which layouts run: combinations of ZeRO, tensor, pipeline and sequence parallelism, and what they must divide."""

from fmengine.config.batch import solve
from fmengine.config.model import ModelConfig
from fmengine.config.schema import Config, ParallelConfig
from fmengine.config.source import Problem, problem
from fmengine.errors import UserError


def layout_problems(config: Config, world_size: int) -> list[Problem]:
    """All that keeps a resolved config from running on `world_size` ranks."""
    parallel = config.parallel
    found = _combination_problems(parallel, config.train.precision)
    found += _tensor_problems(config.model, parallel.tensor_parallel_size)
    found += _pipeline_problems(config.model, parallel.pipeline_parallel_size)
    found += _sequence_problems(config)
    return found + _world_problems(config, world_size)


def _combination_problems(parallel: ParallelConfig, precision: str) -> list[Problem]:
    """Layouts that DeepSpeed does not do, with the reason."""
    tensor, pipeline = parallel.tensor_parallel_size > 1, parallel.pipeline_parallel_size > 1
    sequence, stage = parallel.sequence_parallel_size > 1, parallel.zero_stage
    found = []
    if sequence and tensor:
        text = "not together with tensor_parallel_size: DeepSpeed would silently run without one of them; set one to 1"
        found.append(problem("parallel.sequence_parallel_size", text))
    if sequence and pipeline:
        text = "not together with pipeline_parallel_size: DeepSpeed's pipeline takes no sequence groups; set one to 1"
        found.append(problem("parallel.sequence_parallel_size", text))
    if pipeline and tensor:
        text = "not together with tensor_parallel_size in this version; set one to 1"
        found.append(problem("parallel.pipeline_parallel_size", text))
    if pipeline and stage > 1:
        text = f"{stage} does not run in a pipeline, where gradients must stay whole between micro-batches; set 0 or 1"
        found.append(problem("parallel.zero_stage", text))
    if stage == 0 and precision != "fp32":
        text = f"DeepSpeed does not do 0 in {precision} with fp32 gradient accumulation; set 1, or train.precision fp32"
        found.append(problem("parallel.zero_stage", text))
    return found


def _tensor_problems(model: ModelConfig, size: int) -> list[Problem]:
    """What tensor parallelism splits evenly: heads, key and value heads, the MLP (not the vocabulary)."""
    split = {
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.num_key_value_heads,
        "intermediate_size": model.intermediate_size,
    }
    if split["num_key_value_heads"] == split["num_attention_heads"]:
        del split["num_key_value_heads"]  # said once
    return [
        problem(f"model.{name}", f"{value} is not divisible by tensor_parallel_size {size}; change either")
        for name, value in split.items()
        if (value or 0) % size
    ]


def _pipeline_problems(model: ModelConfig, stages: int) -> list[Problem]:
    layers = model.num_hidden_layers or 0
    if stages <= layers:
        return []
    text = f"{stages} stages for {layers} layers; each stage needs one, so {layers} at most"
    return [problem("parallel.pipeline_parallel_size", text)]


def _sequence_problems(config: Config) -> list[Problem]:
    size, length = config.parallel.sequence_parallel_size, config.data.sequence_length
    heads = config.model.num_attention_heads or 0
    found = []
    if length % size:
        text = f"{length} is not divisible by sequence_parallel_size {size}; each rank holds an equal slice"
        found.append(problem("data.sequence_length", text))
    if heads % size:
        text = f"{heads} is not divisible by sequence_parallel_size {size}; inside attention the heads are split"
        found.append(problem("model.num_attention_heads", text))
    kv_heads = config.model.num_key_value_heads or heads
    if kv_heads != heads and kv_heads % size and size % kv_heads:
        text = f"{kv_heads} and sequence_parallel_size {size}: one must divide the other; change either"
        found.append(problem("model.num_key_value_heads", text))
    return found


def _world_problems(config: Config, world_size: int) -> list[Problem]:
    """Model-parallel sizes against the world size, and the batch triangle for what is left."""
    parallel = config.parallel
    sizes = (parallel.tensor_parallel_size, parallel.pipeline_parallel_size, parallel.sequence_parallel_size)
    model = sizes[0] * sizes[1] * sizes[2]
    if world_size % model:
        text = (
            f"tensor {sizes[0]} x pipeline {sizes[1]} x sequence {sizes[2]} = {model} does not divide the world size "
            f"{world_size}; change the number of GPUs (of validate: --world-size) or these sizes"
        )
        return [problem("parallel", text)]
    try:
        solve(config.batch, world_size // model)
    except UserError as error:
        key, _, text = str(error).partition(": ")
        return [problem(key, text)]
    return []
