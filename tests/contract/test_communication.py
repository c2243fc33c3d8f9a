"""DeepSpeed's communication layer over gloo on one host."""

import os
from collections.abc import Callable
from pathlib import Path

from support.distributed import WorkerPool

Pools = Callable[..., WorkerPool]


def shared_memory_buffers() -> tuple[str | None, list[str]]:
    import deepspeed.comm.comm as comm

    assert comm.cdb.is_initialized()
    mine = f"_{os.environ['MASTER_PORT']}_"
    found = [path.name for path in Path("/dev/shm").glob("deepspeed_allreduce_buffer_*") if mine in path.name]
    return os.environ.get("LOCAL_SIZE"), found


def test_without_local_size_there_is_no_shared_memory(workers: Pools) -> None:
    """`init_distributed` opens its shared-memory all-reduce only where LOCAL_SIZE equals the world size. It must stay
    off: it ignores process groups, spins for ever when a rank dies, and leaves 66 MiB a rank in /dev/shm under a name
    of user, address and port, to which a later run on that port attaches.
    """
    assert workers(2).run(shared_memory_buffers) == [(None, [])] * 2


def shared_memory_op() -> tuple[bool, str]:
    import deepspeed.comm.comm as comm
    from deepspeed.ops.op_builder.cpu.comm import ShareMemCommBuilder

    return comm.cdb.shm_comm_op is None, ShareMemCommBuilder.NAME


def test_its_shared_memory_op_is_not_loaded_where_it_is_said_to_be_incompatible(workers: Pools) -> None:
    """Else `init_distributed` loads it through torch's `FileBaton` in every CPU process: a process killed in that
    moment leaves the file `lock` behind, and every later one waits for it for ever.
    """
    assert workers(2).run(shared_memory_op) == [(True, "deepspeed_shm_comm")] * 2


def tensor_parallel_mode() -> str:
    from deepspeed.module_inject import layers

    return str(layers.DEEPSPEED_AUTOTP_MODE.name)


def test_autotp_s_mode_is_a_process_global_that_starts_as_inference(workers: Pools) -> None:
    """In that mode row-parallel layers call that same all-reduce, which crashes the process where it is off.
    `deepspeed.initialize` with a `tensor_parallel` section sets it to training, for evaluation too.
    """
    assert workers(2).run(tensor_parallel_mode) == ["INFERENCE"] * 2
