"""One rank of a `support.distributed.WorkerPool`: reads calls from a socket, answers with results.

Started as a script with the socket's file descriptor and a time limit for rendezvous; everything else
comes through the environment, as torchrun would set it.
"""

import ctypes
import datetime
import faulthandler
import importlib
import importlib.util
import os
import pickle
import signal
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any

PR_SET_PDEATHSIG = 1  # linux/prctl.h


def die_with_parent() -> None:
    """Ask the kernel to kill this process when the test run dies, even by SIGKILL."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def load_module(name: str, path: str | None) -> ModuleType:
    """The module `name`, from sys.path where `path` is None, else from that file (a test file has no package)."""
    if path is None:
        return importlib.import_module(name)
    known = sys.modules.get(name)
    if known is not None and known.__file__ == path:
        return known
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"no module in {path}")
    module = importlib.util.module_from_spec(spec)
    # Under pytest's name, and with its packages, so that classes of that file can be pickled both ways.
    parents = name.split(".")[:-1]
    for depth in range(len(parents)):
        sys.modules.setdefault(package := ".".join(parents[: depth + 1]), ModuleType(package))
    sys.modules[name] = module
    sys.path.insert(0, str(Path(path).parent))
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    finally:
        sys.path.pop(0)
    return module


def resolve(name: str, path: str | None, qualified: str) -> Callable[..., Any]:
    """The function `qualified` of that module."""
    found: Any = load_module(name, path)
    for part in qualified.split("."):
        found = getattr(found, part)
    function: Callable[..., Any] = found
    return function


def initialize(backend: str) -> None:
    """Join the process group: `deepspeed` through DeepSpeed's own call, `torch` through torch's, `none` not at all."""
    if backend == "none":
        return
    import torch

    torch.set_num_threads(1)
    # The pool has its own, shorter limit; gloo's must not cut in first and hide the stacks.
    limit = datetime.timedelta(hours=1)
    if backend == "torch":
        torch.distributed.init_process_group("gloo", timeout=limit)
        return
    import deepspeed

    from fmengine.engine.process_group import leave_shared_memory_out

    leave_shared_memory_out()
    deepspeed.init_distributed("gloo", timeout=limit, verbose=False)


def answer(call: bytes) -> bytes:
    """Run one pickled call; the answer is a pickled (succeeded, result or traceback)."""
    try:
        name, path, qualified, payload = pickle.loads(call)
        function = resolve(name, path, qualified)
        args, kwargs = pickle.loads(payload)  # after the module, whose classes may be in it
        return pickle.dumps((True, function(*args, **kwargs)))
    except BaseException:  # pytest's own exceptions are no Exceptions
        return pickle.dumps((False, traceback.format_exc()))


def main() -> None:
    """Serve until the socket closes."""
    die_with_parent()
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # in C: works inside a collective too
    connection = Connection(int(sys.argv[1]))
    try:
        initialize(sys.argv[2])
    except BaseException:
        connection.send_bytes(pickle.dumps((False, traceback.format_exc())))
        return
    connection.send_bytes(pickle.dumps((True, None)))
    while True:
        try:
            call = connection.recv_bytes()
        except EOFError:
            break
        connection.send_bytes(answer(call))
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(0)  # no collective clean-up: the other ranks may be gone already


if __name__ == "__main__":
    main()
