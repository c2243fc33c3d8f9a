#!/bin/sh
# project.sh SOURCE: fmengine itself.
set -eu
export SOURCE_DATE_EPOCH=315532800 PYTHONHASHSEED=0 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
python=/opt/fmengine/bin/python

cp -r "$1" /tmp/source
$python -m pip wheel --quiet --no-index --no-deps --no-build-isolation --no-cache-dir --wheel-dir /tmp/project /tmp/source
# By name: pip would write the wheel's path down.
$python -m pip install --quiet --no-index --no-deps --no-cache-dir --find-links /tmp/project fmengine
rm -rf /tmp/source /tmp/project /root/.cache
# Where nothing is bound, the first try still has a place to write.
mkdir -m 1777 /workspace
