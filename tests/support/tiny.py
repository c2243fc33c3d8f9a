"""A network small enough to train on DeepSpeed in milliseconds, and its engine, for the contract tests."""

import copy
from typing import Any

import torch
from torch import Tensor, nn

FEATURES = 6
HIDDEN = 7  # odd, so that ZeRO's partitions cut through parameters and need padding


class TinyNet(nn.Module):
    """Two linear layers around a norm; the forward returns the SUM of squared errors over its micro-batch."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, HIDDEN)
        self.norm = nn.LayerNorm(HIDDEN)
        self.second = nn.Linear(HIDDEN, FEATURES, bias=False)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Inputs and targets [B, FEATURES] to a float32 scalar."""
        outputs = self.second(torch.tanh(self.norm(self.first(inputs.to(self.second.weight.dtype)))))
        loss: Tensor = (outputs.float() - targets).square().sum()
        return loss


def tiny_net(seed: int = 0) -> TinyNet:
    """A float32 TinyNet whose weights depend on the seed alone; the global generator is left as it was."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return TinyNet()


def micro_batch(step: int, micro: int = 0, rank: int = 0, size: int = 2) -> tuple[Tensor, Tensor]:
    """Inputs and targets [size, FEATURES] that depend on the three numbers alone."""
    generator = torch.Generator().manual_seed(1000 * step + 10 * micro + rank)
    inputs, targets = torch.randn(2, size, FEATURES, generator=generator)
    return inputs, targets


def adamw(model: nn.Module, learning_rate: float = 1e-2) -> torch.optim.AdamW:
    """Torch's AdamW in two groups: matrices decay, vectors do not."""
    matrices: list[nn.Parameter] = []
    vectors: list[nn.Parameter] = []
    for parameter in model.parameters():
        shape = getattr(parameter, "ds_shape", parameter.shape)  # cut by zero.Init, a parameter looks one-dimensional
        (matrices if len(shape) > 1 else vectors).append(parameter)
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.95), eps=1e-8)


def config(
    stage: int,
    precision: str = "fp32",
    *,
    accumulation: int = 1,
    clipping: float = 0.0,
    extra: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """DeepSpeed's config for one ZeRO stage; precision fp32, bf16 (fp32 accumulation) or fp16."""
    section: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": clipping,
        "steps_per_print": 2**31 - 1,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage},
        "bf16": {"enabled": precision == "bf16"},
    }
    if precision == "bf16":
        section["data_types"] = {"grad_accum_dtype": "fp32"}
    if precision == "fp16":
        section["fp16"] = {"enabled": True, "initial_scale_power": 8, "hysteresis": 1}
    return section | copy.deepcopy(extra or {})


def tiny_engine(stage: int, precision: str = "fp32", *, learning_rate: float = 1e-2, seed: int = 0, **keys: Any) -> Any:
    """`deepspeed.initialize` on a TinyNet; `keys` as for `config`. ZeRO-3's weights are partitioned by initialize."""
    import deepspeed

    model = tiny_net(seed)
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=adamw(model, learning_rate), config=config(stage, precision, **keys)
    )
    return engine


def train(engine: Any, steps: range, accumulation: int = 1, *, same_data: bool = False, scale: float = 1.0) -> None:
    """Optimizer steps on micro-batches that depend on (step, micro-batch, rank); losses sum over samples."""
    rank = 0 if same_data else torch.distributed.get_rank()
    for step in steps:
        for micro in range(accumulation):
            loss = engine(*micro_batch(step, micro, rank))
            engine.backward(loss * scale, scale_wrt_gas=False)
            engine.step()
