"""The batch triangle: global batch = micro batch x accumulation x data-parallel size."""

from dataclasses import dataclass

from fmengine.config.schema import BatchConfig
from fmengine.errors import UserError


@dataclass(frozen=True)
class BatchSizes:
    """The three sides, all known.

    Attributes:
        global_batch_size: samples in an optimizer step.
        micro_batch_size: samples in one forward pass of one replica.
        gradient_accumulation_steps: micro-batches a replica runs in a step.
    """

    global_batch_size: int
    micro_batch_size: int
    gradient_accumulation_steps: int


def solve(batch: BatchConfig, data_parallel_size: int) -> BatchSizes:
    """Fill in the sides that are not given.

    The global batch with one other side gives the third. The global batch alone is run in one pass
    (accumulation 1). Without a global batch, a missing side is 1 and the global batch grows with the
    number of replicas.

    Raises:
        UserError: nothing is given, or the sides contradict each other; the text shows the arithmetic.
    """
    whole, micro, accumulation = batch.global_batch_size, batch.micro_batch_size, batch.gradient_accumulation_steps
    replicas = data_parallel_size
    if whole is None:
        if micro is None and accumulation is None:
            raise UserError("batch.global_batch_size: not given; say how many samples an optimizer step has")
        micro, accumulation = micro or 1, accumulation or 1
        return BatchSizes(micro * accumulation * replicas, micro, accumulation)
    if micro is not None and accumulation is not None:
        product = micro * accumulation * replicas
        if product != whole:
            raise UserError(
                f"batch.global_batch_size: {micro} micro_batch_size x {accumulation} gradient_accumulation_steps x "
                f"{replicas} data-parallel = {product}, not {whole}; leave one of the three out"
            )
        return BatchSizes(whole, micro, accumulation)
    given = "gradient_accumulation_steps" if accumulation else "micro_batch_size" if micro else ""
    side = accumulation or micro or 1
    other, rest = divmod(whole, side * replicas)
    if rest:
        factor = f"{side} {given} x " if given else ""
        total = f" = {side * replicas}" if given else ""
        raise UserError(
            f"batch.global_batch_size: {whole} is not divisible by {factor}{replicas} data-parallel{total}: "
            f"{whole} / {side * replicas} = {whole / (side * replicas):.4g}; "
            f"{_nearest(whole, side * replicas)} would fit"
        )
    return BatchSizes(whole, side, other) if given == "micro_batch_size" else BatchSizes(whole, other, side)


def _nearest(whole: int, divisor: int) -> str:
    """The multiples of `divisor` on both sides of `whole`."""
    below = whole // divisor * divisor
    return f"{below} or {below + divisor}" if below else str(divisor)
