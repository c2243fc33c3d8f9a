"""Which process of a run this is: a plain value, the same whoever started it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Ranks:
    """A process's place in a run.

    Attributes:
        rank: this process among all, from 0; None where this process is no rank, but could start them.
        local_rank: this process among those of its node; None as above.
        world_size: processes of the run.
        local_world_size: processes of the run on this node.
        node_rank: this node among the run's, from 0.
        num_nodes: nodes of the run.
        device: "cpu" or "cuda:N", N counting the GPUs that this process sees.
        master_addr: host of rank 0.
        master_port: TCP port that rank 0 listens on; None until one is chosen.
        source: the detector that found this.
        reason: what it went by, for a person to read.
    """

    rank: int | None
    local_rank: int | None
    world_size: int
    local_world_size: int
    node_rank: int
    num_nodes: int
    device: str
    master_addr: str
    master_port: int | None
    source: str
    reason: str


class Detector(Protocol):
    """One way in which a run is started."""

    def __call__(self, environ: Mapping[str, str], *, gpus: int) -> Ranks | None:
        """Its place in the run, or None where it was not started this way; UserError where that is half said."""
        ...
