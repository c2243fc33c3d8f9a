#!/bin/sh
# deepspeed.sh VARIANT: DeepSpeed's wheel in /opt/wheels, with the ops that we use compiled: none is at run time.
# CPUAdam is not among them: DeepSpeed compiles it for the processor that it is built on.
set -eu
# shellcheck source=containers/scripts/pip.sh
. "$(dirname "$0")/pip.sh"

sources=$locks/$1.txt
export DS_ACCELERATOR=cpu
if [ "$1" = cpu ]; then
    export DS_BUILD_SHM_COMM=1
else
    sources=$locks/$1-source.txt
    export DS_ACCELERATOR=cuda
fi
if [ -n "${CUDA_ARCHITECTURES-}" ]; then
    TORCH_CUDA_ARCH_LIST=$(echo "$CUDA_ARCHITECTURES" | tr , ';')
    export CUDA_HOME=/opt/cuda DS_BUILD_FUSED_ADAM=1 TORCH_CUDA_ARCH_LIST MAX_JOBS="$JOBS"
fi

key=$(cat "$locks/$1".txt "$locks/$1"-*.txt "$0" | cat - /etc/debian_version | sha256sum | cut -c -16)
cache=/var/cache/fmengine/deepspeed-$(uname -m)-${CUDA_ARCHITECTURES:-none}-$key
if ! ls "$cache"/*.whl >/dev/null 2>&1; then
    unpack_source deepspeed "$sources"
    # No debug information: it is larger than the code.
    (cd /tmp/build && LDFLAGS=-Wl,--strip-all "$venv/bin/python" -m pip wheel --quiet --no-deps --no-build-isolation \
        --no-cache-dir --wheel-dir "$cache" .)
    rm -rf /tmp/build /tmp/source
fi
mkdir -p /opt/wheels
cp "$cache"/*.whl /opt/wheels/
