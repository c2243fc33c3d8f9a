#!/bin/sh
# slim.sh: takes out of the venv what only compiling against torch and testing the packages needs.
set -eu

cd /opt/fmengine/lib/python3*/site-packages
find torch/bin -type f ! -name torch_shm_manager -delete
rm -rf torch/include torch/share torch/test
for package in mpmath networkx numpy sympy; do
    find "$package" -type d -name tests -prune -exec rm -rf {} +
done
