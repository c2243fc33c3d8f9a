# shellcheck shell=sh
# Sourced by the other scripts: pip as they all use it. A site's index and CA are in the build secrets pip.conf and ca.crt.

# shellcheck disable=SC2034  # the other scripts use it
locks=/run/build/locks
venv=/opt/fmengine

export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1 PIP_ROOT_USER_ACTION=ignore
# Of the modules that pip compiles, the time of installation then stays out.
export SOURCE_DATE_EPOCH=315532800 PYTHONHASHSEED=0
if [ -f /run/secrets/pip.conf ]; then
    export PIP_CONFIG_FILE=/run/secrets/pip.conf
fi
if [ -f /run/secrets/ca.crt ]; then
    export PIP_CERT=/run/secrets/ca.crt
fi

# only REGEX LOCK...: the requirements of locks whose name fits, with their hashes; `but` prints the others.
only() {
    pattern=$1
    shift
    cat "$@" | awk -v pattern="^($pattern)==" '/^[a-z]/ { keep = $0 ~ pattern } keep'
}
but() {
    pattern=$1
    shift
    cat "$@" | awk -v pattern="^($pattern)==" '/^[a-z]/ { keep = $0 !~ pattern } keep'
}

# install_locked PYTHON FILE: exactly what the file names, by hash. Wheels may lie in a folder too.
install_locked() {
    "$1" -m pip install --quiet --no-deps --only-binary :all: --find-links /run/build/wheels --require-hashes -r "$2"
}

# unpack_source NAME LOCK...: a source distribution, by hash, into /tmp/build: a fixed place, since compilers write it down.
unpack_source() {
    rm -rf /tmp/build /tmp/source
    mkdir -p /tmp/build /tmp/source
    name=$1
    shift
    only "$name" "$@" >/tmp/source/lock.txt
    "$venv/bin/python" -m pip download --quiet --no-deps --no-build-isolation --no-binary :all: --no-cache-dir \
        --require-hashes -r /tmp/source/lock.txt --dest /tmp/source
    tar -xzf /tmp/source/*.tar.gz -C /tmp/build --strip-components 1
}
