#!/bin/sh
# compiler.sh VARIANT: what only compiling needs. nvcc comes from PyPI and lands in nvidia/cu13 of the venv, together with
# CUDA's libraries and headers: that folder is CUDA_HOME.
set -eu
# shellcheck source=containers/scripts/pip.sh
. "$(dirname "$0")/pip.sh"

install_locked "$venv/bin/python" "$locks/$1-build.txt"

cuda=$(echo "$venv"/lib/python3*/site-packages/nvidia/cu13)
if [ -x "$cuda/bin/nvcc" ]; then
    ln -sfn "$cuda" /opt/cuda
    # The linker asks for names that the wheels leave out.
    ln -sfn lib "$cuda/lib64"
    for library in "$cuda"/lib/*.so.*; do
        ln -sfn "$(basename "$library")" "${library%%.so.*}.so"
    done
    /opt/cuda/bin/nvcc --version
fi
