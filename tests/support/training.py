"""Tiny runs for the multi-process tests: fixed global batches, an engine at any layout, the plain loop it must equal.

The rows are padded very unevenly (from one target to a full row), so that a loss averaged by micro-batch or by
rank instead of by target shows at once.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fmengine.batch import IGNORE_INDEX, Batch
from fmengine.config.batch import BatchSizes, solve
from fmengine.config.resolve import resolve
from fmengine.config.schema import Config
from fmengine.parallel import Topology

VOCAB = 61
LENGTH = 16
ROWS = 8

MODELS: dict[str, dict[str, Any]] = {
    "llama": {
        "family": "llama",
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": LENGTH,
    },
    "neox": {
        "family": "neox",
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": LENGTH,
    },
}


@dataclass(frozen=True)
class Case:
    """One tiny run; picklable.

    Attributes:
        parallel: the `parallel:` section.
        micro_batch_size: accumulation follows from ROWS and the world.
        steps: optimizer steps.
        model: which of MODELS, with `options` over it.
        options: architecture options.
        precision: of the engine.
        clipping: gradient clipping; the default is far below the gradients' norm, so it is always active.
    """

    parallel: dict[str, int] = field(default_factory=dict)
    micro_batch_size: int = ROWS
    steps: int = 10
    model: str = "llama"
    options: dict[str, Any] = field(default_factory=dict)
    precision: str = "fp32"
    clipping: float = 0.25
    activation_checkpointing: str = "none"

    def config(self) -> Config:
        """The whole config, resolved."""
        config = Config.model_validate(
            {
                "run": {"seed": 7},
                "model": {**MODELS[self.model], **self.options},
                "data": {"sequence_length": LENGTH},
                "batch": {"global_batch_size": ROWS, "micro_batch_size": self.micro_batch_size},
                "parallel": self.parallel,
                "optimizer": {"learning_rate": 3e-3, "gradient_clipping": self.clipping},
                "schedule": {"warmup_steps": 3, "shape": "cosine"},
                "train": {
                    "steps": 30,
                    "precision": self.precision,
                    "activation_checkpointing": self.activation_checkpointing,
                },
            }
        )
        resolved, problems = resolve(config)
        assert not problems, problems
        return resolved

    def topology(self, rank: int, world_size: int) -> Topology:
        """A rank's place."""
        sizes = {key: value for key, value in self.parallel.items() if key != "zero_stage"}
        return Topology(rank=rank, world_size=world_size, **sizes)


def global_rows(step: int) -> tuple[Tensor, Tensor]:
    """Token ids [ROWS, LENGTH] and the real length of each row, of one step; from 2 tokens to LENGTH."""
    generator = torch.Generator().manual_seed(1000 + step)
    ids = torch.randint(0, VOCAB, (ROWS, LENGTH), generator=generator)
    lengths = torch.tensor([LENGTH, 2, 3, LENGTH, 2, 5, 9, 2]).roll(step)
    return ids, lengths


def as_batch(ids: Tensor, lengths: Tensor, part: slice) -> Batch:
    """Rows as a Batch: each row its real document, and the padding as one document without targets."""
    rows, length = ids.shape
    targets = torch.full_like(ids, IGNORE_INDEX)
    positions = torch.zeros_like(ids)
    bounds = [0]
    for row, real in enumerate(lengths.tolist()):
        targets[row, : real - 1] = ids[row, 1:real]
        positions[row] = torch.cat([torch.arange(real), torch.arange(length - real)])
        bounds += [row * length + real, (row + 1) * length]
    bounds += [rows * length] * (2 * rows + 1 - len(bounds))
    return Batch(ids[:, part], targets[:, part], positions[:, part], torch.tensor(bounds, dtype=torch.int32))


def step_batches(step: int, sizes: BatchSizes, topology: Topology) -> list[Batch]:
    """Micro-batches of this rank in a step, cut from the global rows as the loader cuts samples."""
    ids, lengths = global_rows(step)
    size = LENGTH // topology.sequence_parallel_size
    part = slice(topology.sequence_rank * size, (topology.sequence_rank + 1) * size)
    batches = []
    for micro in range(sizes.gradient_accumulation_steps):
        first = (micro * topology.data_parallel_size + topology.data_rank) * sizes.micro_batch_size
        rows = slice(first, first + sizes.micro_batch_size)
        batches.append(as_batch(ids[rows], lengths[rows], part))
    return batches


def make_engine(case: Case, source: Any = None, device: str = "cpu") -> tuple[Any, Any]:
    """An engine for a case in this process group, and the plan it was built from."""
    from deepspeed.utils import groups

    from fmengine.engine.build import Build, build
    from fmengine.models.weights import from_seed

    groups.mpu = None  # an earlier case's layout
    config = case.config()
    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    topology = case.topology(rank, world_size)
    sizes = solve(config.batch, topology.data_parallel_size)
    plan = Build(config, sizes, topology, torch.device(device), source or from_seed(config.model, config.run.seed))
    return build(plan), plan


def train(engine: Any, plan: Any, steps: int) -> list[tuple[float, float, float]]:
    """Loss, gradient norm and learning rate of the next `steps` steps."""
    results = []
    for step in range(engine.step, engine.step + steps):
        result = engine.train_step(step_batches(step, plan.sizes, plan.topology))
        results.append((float(result.loss), float(result.grad_norm), result.learning_rate))
    return results


def run_case(case: Case) -> dict[str, Any]:
    """Train a case on every rank, then evaluate on the rows of step 99: what each rank saw."""
    engine, plan = make_engine(case)
    steps = train(engine, plan, case.steps)
    evaluated = engine.evaluate(step_batches(99, plan.sizes, plan.topology))
    return {"steps": steps, "eval": (evaluated.loss_sum, evaluated.target_tokens)}


def run_cases(cases: list[Case]) -> list[dict[str, Any]]:
    """Several cases in the same processes."""
    return [run_case(case) for case in cases]


def plain_loop(case: Case) -> dict[str, Any]:
    """The same training by Transformers' model and torch alone, on whole global batches."""
    from fmengine.schedule import learning_rate

    config = case.config()
    model = hf_model(config)
    settings = config.optimizer
    optimizer = torch.optim.AdamW(
        decay_groups(model, settings.weight_decay),
        lr=settings.learning_rate,
        betas=settings.betas,
        eps=settings.eps,
    )
    steps = []
    for step in range(case.steps):
        rate = learning_rate(step, steps=config.train.steps, peak=settings.learning_rate, schedule=config.schedule)
        for group in optimizer.param_groups:
            group["lr"] = rate
        loss_sum, targets = hf_loss(model, step)
        (loss_sum / targets).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), settings.gradient_clipping)
        optimizer.step()
        optimizer.zero_grad()
        steps.append((loss_sum.item() / targets, norm.item(), rate))
    with torch.no_grad():
        loss_sum, targets = hf_loss(model, 99)
    return {"steps": steps, "eval": (float(loss_sum), targets)}


def decay_groups(model: Any, weight_decay: float) -> list[dict[str, Any]]:
    """The optimizer's groups for Transformers' model: matrices decay; norms, biases and the embedding do not."""
    decayed = [p for n, p in model.named_parameters() if p.ndim > 1 and "embed" not in n.replace("embed_out", "")]
    plain = [p for p in model.parameters() if all(p is not other for other in decayed)]
    return [{"params": decayed, "weight_decay": weight_decay}, {"params": plain, "weight_decay": 0.0}]


def hf_model(config: Config, attention: str = "eager") -> Any:
    """Transformers' float32 model under the same initial weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from fmengine.models.hf import to_hf, write_config
    from fmengine.models.registry import family_of
    from fmengine.models.weights import from_seed

    written = write_config(config.model)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(**written), dtype=torch.float32, attn_implementation=attention
    )
    source = from_seed(config.model, config.run.seed)
    state: dict[str, Tensor] = {}
    for name in family_of(config.model).parameter_shapes(config.model):
        state |= to_hf(config.model, name, source(name))
    if hasattr(model, "lm_head") and "embed_out.weight" in state:
        state["lm_head.weight"] = state.pop("embed_out.weight")  # renamed in memory, not in files, by Transformers 5
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected, unexpected
    assert all("lm_head" in name or "embed_out" in name for name in missing), missing
    model.tie_weights()
    return model


def hf_loss(model: Any, step: int) -> tuple[Tensor, int]:
    """Summed cross entropy and number of targets of a step's global batch, padding masked the usual way."""
    ids, lengths = global_rows(step)
    mask = torch.arange(LENGTH)[None] < lengths[:, None]
    logits = model(input_ids=ids, attention_mask=mask.long()).logits.float()
    targets = ids[:, 1:].masked_fill(~mask[:, 1:], IGNORE_INDEX)
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), targets.flatten(), reduction="sum")
    return loss, int((targets != IGNORE_INDEX).sum())
