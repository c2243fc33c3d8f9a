"""Ranks from the variables that torchrun sets (and launch.local, and whoever imitates them).

Source: https://docs.pytorch.org/docs/stable/elastic/run.html#environment-variables
"""

from collections.abc import Mapping

from fmengine.errors import UserError
from fmengine.launch.device import device_of
from fmengine.launch.ranks import Ranks

TELLING = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
"""One of these says that a launcher was here; MASTER_ADDR alone may come from a batch script."""

NEEDED = (*TELLING, "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def detect_torchrun(environ: Mapping[str, str], *, gpus: int) -> Ranks | None:
    """The process's place as torchrun's variables tell it; None without them.

    Raises:
        UserError: some are missing, no number, or contradict each other.
    """
    given = [name for name in NEEDED if environ.get(name)]
    if not any(name in given for name in TELLING):
        return None
    missing = [name for name in NEEDED if name not in given]
    if missing:
        raise UserError(
            f"{missing[0]}: not set, though {given[0]}={environ[given[0]]} is; start with torchrun, which sets "
            f"{', '.join(NEEDED)}, or unset {', '.join(given)}"
        )
    rank, world = _number(environ, "RANK"), _number(environ, "WORLD_SIZE", least=1)
    local, local_world = _number(environ, "LOCAL_RANK"), _number(environ, "LOCAL_WORLD_SIZE", least=1)
    port = _number(environ, "MASTER_PORT", least=1)
    _below("RANK", rank, "WORLD_SIZE", world)
    _below("LOCAL_RANK", local, "LOCAL_WORLD_SIZE", local_world)
    _below("LOCAL_WORLD_SIZE", local_world, "WORLD_SIZE", world + 1)
    _below("MASTER_PORT", port, "the number of ports", 1 << 16)
    if local_world == world and local != rank:
        raise UserError(f"LOCAL_RANK={local}: must be RANK={rank} where all {world} processes are on one node")
    node, nodes = _nodes(environ, rank, world, local_world)
    return Ranks(
        rank=rank,
        local_rank=local,
        world_size=world,
        local_world_size=local_world,
        node_rank=node,
        num_nodes=nodes,
        device=device_of(local, local_world, gpus),
        master_addr=environ["MASTER_ADDR"],
        master_port=port,
        source="torchrun",
        reason=f"RANK={rank} of WORLD_SIZE={world} and LOCAL_RANK={local} of LOCAL_WORLD_SIZE={local_world} are set",
    )


def _nodes(environ: Mapping[str, str], rank: int, world: int, local_world: int) -> tuple[int, int]:
    """Rank of the node and how many there are; torchrun says so itself, others leave it to arithmetic."""
    if environ.get("GROUP_WORLD_SIZE"):
        nodes = _number(environ, "GROUP_WORLD_SIZE", least=1)
    elif world % local_world:
        raise UserError(
            f"LOCAL_WORLD_SIZE={local_world}: does not divide WORLD_SIZE={world}; start as many processes on each "
            "node, or set GROUP_WORLD_SIZE to the number of nodes"
        )
    else:
        nodes = world // local_world
    node = _number(environ, "GROUP_RANK") if environ.get("GROUP_RANK") else rank // local_world
    _below("GROUP_RANK", node, "the number of nodes", nodes)
    return node, nodes


def _number(environ: Mapping[str, str], name: str, least: int = 0) -> int:
    text = environ[name].strip()
    if not (text.isascii() and text.isdecimal()) or int(text) < least:
        raise UserError(f"{name}={environ[name]}: must be a whole number of {least} or more; start with torchrun")
    return int(text)


def _below(name: str, value: int, bound_name: str, bound: int) -> None:
    if value >= bound:
        raise UserError(f"{name}={value}: must be below {bound_name} ({bound}); start with torchrun, or unset it")
