"""What a run says about itself: the console, metrics.jsonl and one log file a rank."""

from fmengine.monitor.chips import Device, describe
from fmengine.monitor.monitor import Monitor

__all__ = ["Device", "Monitor", "describe"]
