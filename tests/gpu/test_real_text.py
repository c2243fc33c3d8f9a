"""Real text on one GPU: 200 steps in bf16 stay within 1 % of a plain PyTorch + Transformers loop.

The same weights, the same packed batches with documents kept apart; the plain loop is Transformers' model in bf16
with SDPA under the block-diagonal mask, float32 master weights and gradients beside it, AdamW, clipping.
"""

import copy
import gc
import json
import math

import pytest
import torch

from fmengine.batch import IGNORE_INDEX, Batch
from fmengine.config.batch import solve
from fmengine.config.resolve import resolve
from fmengine.config.schema import Config
from fmengine.data.default import prepare_default
from fmengine.data.loader import TrainLoader, split_documents
from fmengine.data.tokens import TokenReader
from fmengine.engine.build import Build, build
from fmengine.kernels.attention import document_mask
from fmengine.models.weights import from_seed
from fmengine.parallel import Topology
from fmengine.schedule import learning_rate
from support.training import decay_groups, hf_model

STEPS = 200
DEVICE = torch.device("cuda:0")


def config_of(family: str) -> Config:
    """A model of about 100 million parameters."""
    config = Config.model_validate(
        {
            "model": {
                "family": family,
                "vocab_size": 8192,
                "hidden_size": 768,
                "num_hidden_layers": 12,
                "num_attention_heads": 12,
                **({"num_key_value_heads": 4} if family == "llama" else {}),
            },
            "data": {"sequence_length": 1024},
            "batch": {"global_batch_size": 32, "micro_batch_size": 16},
            "parallel": {"zero_stage": 1},
            "optimizer": {"learning_rate": 6e-4},
            "schedule": {"warmup_steps": 50},
            "train": {"steps": STEPS, "precision": "bf16"},
        }
    )
    resolved, problems = resolve(config)
    assert not problems
    return resolved


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> TokenReader:
    return TokenReader(prepare_default(tmp_path_factory.mktemp("text"), vocab_size=8192).prefix)


@pytest.mark.parametrize("family", ["llama", "neox"])
def test_losses_stay_within_a_percent_of_the_plain_loop(family, text, capsys):
    config = config_of(family)
    sizes = solve(config.batch, 1)
    loader = TrainLoader(
        text,
        documents=split_documents(text, 0.02)[0],
        sequence_length=config.data.sequence_length,
        sizes=sizes,
        topology=Topology(0, 1),
        seed=1,
        vocab_size=8192,
    )
    ours, our_memory = train_ours(config, sizes, loader)
    plain, plain_memory = train_plain(config, loader)
    worst = max(abs(a - b) / b for a, b in zip(ours, plain, strict=True))
    report = {
        "family": family,
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "first_loss": ours[0],
        "last_loss": ours[-1],
        "plain_last_loss": plain[-1],
        "worst_relative_difference": worst,
        "peak_memory_gib": our_memory / 2**30,
        "plain_peak_memory_gib": plain_memory / 2**30,
    }
    with capsys.disabled():
        print("\n" + json.dumps(report))
        far = [step for step in range(STEPS) if abs(ours[step] - plain[step]) / plain[step] > 0.005]
        print("steps more than 0.5 % apart:", [(step, round(ours[step], 4), round(plain[step], 4)) for step in far])
    assert len(ours) == STEPS
    assert ours[-1] < 0.7 * math.log(8192), "it must have learned something"
    assert worst < 0.01


def start_of_memory() -> int:
    """What earlier tests still hold, once what can be freed is."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def train_ours(config: Config, sizes, loader: TrainLoader) -> tuple[list[float], int]:
    """Losses and peak memory of the product's engine."""
    held = start_of_memory()
    engine = build(Build(config, sizes, Topology(0, 1), DEVICE, from_seed(config.model, config.run.seed)))
    losses = [engine.train_step(loader.step(step)).loss for step in range(STEPS)]
    return torch.stack(losses).tolist(), torch.cuda.max_memory_allocated() - held


def train_plain(config: Config, loader: TrainLoader) -> tuple[list[float], int]:
    """Losses and peak memory of the plain loop."""
    held = start_of_memory()
    master = hf_model(config, attention="sdpa").to(DEVICE)
    model = copy.deepcopy(master).to(torch.bfloat16)
    for parameter, low in zip(master.parameters(), model.parameters(), strict=True):
        parameter.data.copy_(low.data)  # both start from the rounded weights, as DeepSpeed's masters do
    settings = config.optimizer
    optimizer = torch.optim.AdamW(
        decay_groups(master, settings.weight_decay), lr=1.0, betas=settings.betas, eps=settings.eps, fused=True
    )
    losses = []
    for step in range(STEPS):
        rate = learning_rate(step, steps=STEPS, peak=settings.learning_rate, schedule=config.schedule)
        for group in optimizer.param_groups:
            group["lr"] = rate
        losses.append(plain_gradients(master, model, [batch.to(DEVICE) for batch in loader.step(step)]))
        torch.nn.utils.clip_grad_norm_(master.parameters(), settings.gradient_clipping)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for parameter, low in zip(master.parameters(), model.parameters(), strict=True):
                low.copy_(parameter)
    return torch.stack(losses).tolist(), torch.cuda.max_memory_allocated() - held


def plain_gradients(master, model, batches: list[Batch]) -> torch.Tensor:
    """Loss of a step; its gradient is accumulated in float32 on the master weights."""
    targets = sum((batch.targets != IGNORE_INDEX).sum() for batch in batches)
    total = torch.zeros((), device=DEVICE)
    for batch in batches:
        loss = plain_loss(model, batch) / targets
        loss.backward()
        total += loss.detach()
        for parameter, low in zip(master.parameters(), model.parameters(), strict=True):
            gradient = low.grad.float()
            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
            low.grad = None
    return total


def plain_loss(model, batch: Batch) -> torch.Tensor:
    """Summed cross entropy of a packed micro-batch."""
    mask = document_mask(batch.cu_seqlens, *batch.input_ids.shape)
    logits = model(input_ids=batch.input_ids, position_ids=batch.position_ids, attention_mask=mask).logits
    return torch.nn.functional.cross_entropy(
        logits.float().flatten(0, 1), batch.targets.flatten(), ignore_index=IGNORE_INDEX, reduction="sum"
    )
