"""Encoding on several processes: blocks in, tokens out in the same order, a bounded number under way."""

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Generator, Iterable
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from fmengine.data.blocks import Block
from fmengine.data.encode import Encoded, Encoder
from fmengine.data.tokenizer import load_tokenizer
from fmengine.errors import UserError


@dataclass(frozen=True)
class EncoderSpec:
    """What a worker needs to make its `Encoder`."""

    tokenizer: Path
    end_id: int
    text_key: str


def encode_blocks(blocks: Iterable[Block], spec: EncoderSpec, workers: int) -> Generator[Encoded, None, None]:
    """Encode blocks on `workers` processes (one: in this process), in the blocks' order.

    Raises:
        UserError: a worker process died.
    """
    if workers == 1:
        yield from (encode_block(spec, block) for block in blocks)
        return
    # spawn: a fork of a process with threads (ours may have torch's) can deadlock.
    pool = ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn"), initializer=_start_worker)
    under_way: deque[Future[Encoded]] = deque()
    try:
        for block in blocks:
            under_way.append(pool.submit(encode_block, spec, block))
            if len(under_way) > 2 * workers:
                yield under_way.popleft().result()
        while under_way:
            yield under_way.popleft().result()
    except BrokenProcessPool as error:
        raise UserError(
            "a worker process of prepare was killed, most likely for want of memory; use fewer --workers"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def encode_block(spec: EncoderSpec, block: Block) -> Encoded:
    """Encode one block; each process reads the tokenizer once."""
    return _encoder(spec)(block)


@lru_cache(maxsize=1)
def _encoder(spec: EncoderSpec) -> Encoder:
    return Encoder(load_tokenizer(spec.tokenizer), spec.end_id, spec.text_key)


def _start_worker() -> None:
    """Leave Ctrl-C to the parent, and end when the parent ends in whatever way: a pool's workers would stay."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
