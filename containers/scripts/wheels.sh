#!/bin/sh
# wheels.sh: installs what was compiled; fails where one does not import.
set -eu
export SOURCE_DATE_EPOCH=315532800 PYTHONHASHSEED=0
python=/opt/fmengine/bin/python

for wheel in /run/build/wheels/*.whl; do
    name=$(basename "$wheel" | cut -d - -f 1)
    # By name: pip would write the wheel's path down.
    $python -m pip install --quiet --disable-pip-version-check --root-user-action ignore --no-index --no-deps \
        --no-cache-dir --find-links /run/build/wheels "$name"
    PYTHONDONTWRITEBYTECODE=1 $python -c "import $name"
done
rm -rf /root/.cache /root/.triton /tmp/*
