#!/bin/sh
# The image's `fmengine` command. -I: no PYTHONPATH, PYTHONHOME or ~/.local of the host reaches Python, which reads
# them before any line of ours.
exec "${FMENGINE_PYTHON:-/opt/fmengine/bin/python}" -I -m fmengine "$@"
