#!/bin/sh
# flash-attn.sh VARIANT: flash-attn's wheel in /opt/wheels. Forced to compile, or its setup fetches a wheel by no hash.
# Not run yet for all architectures. An interrupted build goes on where it was: the objects are in the cache too.
set -eu
# shellcheck source=containers/scripts/pip.sh
. "$(dirname "$0")/pip.sh"

FLASH_ATTN_CUDA_ARCHS=$(echo "$CUDA_ARCHITECTURES" | tr -d . | tr , ';')
TORCH_CUDA_ARCH_LIST=$(echo "$CUDA_ARCHITECTURES" | tr , ';')
export FLASH_ATTENTION_FORCE_BUILD=TRUE FLASH_ATTN_CUDA_ARCHS TORCH_CUDA_ARCH_LIST
export CUDA_HOME=/opt/cuda MAX_JOBS="$JOBS" NVCC_THREADS=1

key=$(cat "$locks/$1".txt "$locks/$1"-*.txt "$0" | cat - /etc/debian_version | sha256sum | cut -c -16)
cache=/var/cache/fmengine/flash-attn-$(uname -m)-$CUDA_ARCHITECTURES-$key
if ! ls "$cache"/*.whl >/dev/null 2>&1; then
    unpack_source flash-attn "$locks/$1-source.txt"
    mkdir -p "$cache/build"
    ln -s "$cache/build" /tmp/build/build
    (cd /tmp/build && "$venv/bin/python" -m pip wheel --quiet --no-deps --no-build-isolation --no-cache-dir \
        --wheel-dir "$cache" .)
    rm -rf /tmp/build /tmp/source "$cache/build"
fi
mkdir -p /opt/wheels
cp "$cache"/*.whl /opt/wheels/
