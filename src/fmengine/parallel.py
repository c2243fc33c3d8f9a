"""Which rank is which: the coordinates of a rank in the pipeline, data, sequence and tensor axes.

Order of the axes, slowest first: pipe, data, sequence, tensor. Ranks of one tensor group are
neighbours (one node, NVLink), then those of one sequence group; pipeline stages are farthest apart.
This is also DeepSpeed's own order (`PipeModelDataParallelTopology`: pipe, data, model).
"""

from dataclasses import dataclass

from fmengine.errors import UserError


@dataclass(frozen=True)
class Topology:
    """Sizes of the axes and this rank's place; `world_size` is their product."""

    rank: int
    world_size: int
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    sequence_parallel_size: int = 1

    def __post_init__(self) -> None:
        model = self.tensor_parallel_size * self.pipeline_parallel_size * self.sequence_parallel_size
        if self.world_size % model:
            raise UserError(
                f"parallel: tensor {self.tensor_parallel_size} x pipeline {self.pipeline_parallel_size} x "
                f"sequence {self.sequence_parallel_size} = {model} does not divide the world size {self.world_size}; "
                "change the number of GPUs or these sizes"
            )

    @property
    def data_parallel_size(self) -> int:
        """How many replicas see different samples."""
        model = self.tensor_parallel_size * self.pipeline_parallel_size * self.sequence_parallel_size
        return self.world_size // model

    @property
    def tensor_rank(self) -> int:
        """Place in the tensor-parallel group."""
        return self.rank % self.tensor_parallel_size

    @property
    def sequence_rank(self) -> int:
        """Place in the sequence-parallel group: which slice of the sequence it holds."""
        return self.rank // self.tensor_parallel_size % self.sequence_parallel_size

    @property
    def data_rank(self) -> int:
        """Which of the data-parallel replicas this rank belongs to."""
        return self.rank // (self.tensor_parallel_size * self.sequence_parallel_size) % self.data_parallel_size

    @property
    def pipe_rank(self) -> int:
        """Pipeline stage."""
        return self.rank // (self.world_size // self.pipeline_parallel_size)
