"""DeepSpeed's `save_checkpoint`, made durable and unable to hang on one rank's full disk.

DeepSpeed has barriers inside `save_checkpoint`. A rank whose write fails would leave it with an
exception while the others wait; so the write's error is kept until every rank is through, and is
raised then. Each file is flushed by the process that wrote it: on a parallel file system no other
node can do that.
"""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from fmengine.checkpoint.collective import TorchCollective
from fmengine.checkpoint.names import LAYOUT_FILE, EngineNames, merge

TAG = "state"
"""Name of the folder below engine/ that DeepSpeed's files are in; the step is in the checkpoint's own name."""


class _DurableWriter:
    """DeepSpeed's checkpoint engine with another `save`; everything else is the original's."""

    def __init__(self, original: Any) -> None:
        self._original = original
        self.error: Exception | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)

    def save(self, state_dict: Any, path: str) -> None:
        import torch

        self.write(Path(path), lambda file: torch.save(state_dict, file))

    def write(self, path: Path, write: Callable[[BinaryIO], object]) -> None:
        """Write a file and flush it to the disk; after a first error nothing more is written."""
        try:
            if self.error is None:
                with path.open("wb") as file:
                    write(file)
                    file.flush()
                    os.fsync(file.fileno())
        except Exception as error:
            # torch wraps what the file raised into an error of its own
            cause = error if isinstance(error, OSError) else error.__context__
            self.error = cause if isinstance(cause, OSError) else error
            if isinstance(self.error, OSError):
                self.error.filename = self.error.filename or str(path)


def save_deepspeed(engine: Any, folder: Path, names: Mapping[str, str]) -> None:
    """Write a DeepSpeed engine's state into FOLDER/state and, from rank 0, FOLDER/layout.json; collective.

    Args:
        engine: a DeepSpeedEngine or PipelineEngine.
        folder: existing, visible to every rank.
        names: DeepSpeed's parameter name -> canonical name, for every parameter of this rank.

    Raises:
        OSError: this rank could not write; raised after the last of the collectives, so that no rank is
            left waiting (`collective.agree` then tells the others).
    """
    own = EngineNames(parameter_names=dict(names), optimizer_order=_optimizer_order(engine))
    tables = TorchCollective().gather_object(own)
    original = engine.checkpoint_engine
    writer = _DurableWriter(original)
    if tables is not None:
        text = merge(tables).model_dump_json(indent=1)
        writer.write(folder / LAYOUT_FILE, lambda file: file.write(text.encode()))
    engine.checkpoint_engine = writer
    # DeepSpeed copies its zero_to_fp32.py beside the state, on rank 0 and before a barrier; `reader` does that work.
    engine._copy_recovery_script = lambda _: None
    try:
        engine.save_checkpoint(str(folder), tag=TAG, save_latest=False)
    finally:
        engine.checkpoint_engine = original
        del engine._copy_recovery_script
    if writer.error is not None:
        raise writer.error


def _optimizer_order(engine: Any) -> dict[int, list[str]]:
    """DeepSpeed's names in the order in which ZeRO-0's optimizer numbers its state; empty under ZeRO."""
    if engine.zero_optimization():
        return {}
    names = {id(parameter): name for name, parameter in engine.module.named_parameters()}
    order = [names[id(parameter)] for group in engine.optimizer.param_groups for parameter in group["params"]]
    return {engine.checkpoint_mp_rank: order}
