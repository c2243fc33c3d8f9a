"""Who started this process, and which rank it is: the first detector that knows."""

from collections.abc import Mapping

from fmengine.launch.local import detect_local
from fmengine.launch.ranks import Detector, Ranks
from fmengine.launch.torchrun import detect_torchrun

DETECTORS: tuple[Detector, ...] = (detect_torchrun,)
"""In the order they are asked. A launcher inside a batch job comes before the batch system."""


def detect(environ: Mapping[str, str], *, gpus: int) -> Ranks:
    """The process's place in a run; where nothing started it as a rank, what it could start itself.

    Args:
        environ: the process's environment.
        gpus: GPUs that this process sees (`device.count_gpus`).

    Raises:
        UserError: the environment contradicts itself; the text names the variable.
    """
    for detector in DETECTORS:
        ranks = detector(environ, gpus=gpus)
        if ranks is not None:
            return ranks
    return detect_local(gpus=gpus)
