"""Everything about a run that can be checked without a GPU, before a job is queued."""

from fmengine.config.files import input_problems, output_problems
from fmengine.config.layout import layout_problems
from fmengine.config.owned import owned_problems
from fmengine.config.schema import Config
from fmengine.config.source import Problem, Source, dotted, problem
from fmengine.errors import UserError


def check(config: Config, world_size: int, source: Source | None = None) -> list[str]:
    """What would keep a resolved config from running on `world_size` ranks, a line each; empty when nothing would.

    Args:
        config: from `config.load`.
        world_size: ranks of the run.
        source: where the keys were given (`load_with_source`), to name file and line.

    Reads the headers of the data and the tokenizer; writes nothing that stays.
    """
    found = layout_problems(config, world_size)
    found += schedule_problems(config)
    found += owned_problems(config.deepspeed)
    found += input_problems(config)
    found += output_problems(config)
    if source is None:
        return [f"{dotted(one.key)}: {one.text}" for one in found]
    return [source.line(one) for one in sorted(found, key=source.order)]


def check_or_raise(config: Config, world_size: int, source: Source | None = None) -> None:
    """`check`, as an error.

    Raises:
        UserError: all problems together.
    """
    problems = check(config, world_size, source)
    if problems:
        raise UserError(problems)


def schedule_problems(config: Config) -> list[Problem]:
    """Steps, warm-up, decay, validation and sequence length that do not fit each other."""
    train, schedule, data = config.train, config.schedule, config.data
    found = []
    decay = schedule.decay_steps or 0
    if decay and schedule.shape != "wsd":
        text = f"only shape wsd has it, not {schedule.shape}; leave it out"
        found.append(problem("schedule.decay_steps", text))
    elif schedule.warmup_steps + decay > train.steps:
        text = f"{schedule.warmup_steps} warmup_steps + {decay} decay_steps = {schedule.warmup_steps + decay}"
        found.append(problem("schedule.warmup_steps", f"{text} are more than train.steps {train.steps}"))
    if train.eval_interval and data.validation is None and not data.validation_fraction:
        text = "nothing to validate on; set data.validation or data.validation_fraction, or leave it out"
        found.append(problem("train.eval_interval", text))
    longest = config.model.max_position_embeddings or data.sequence_length
    if data.sequence_length > longest:
        text = f"{data.sequence_length} is longer than model.max_position_embeddings {longest}; shorten it"
        found.append(problem("data.sequence_length", text))
    return found
