#!/usr/bin/env bash
# rootfs.sh VARIANT FOLDER: the image's root file system without Docker, as root: mmdebstrap makes the base, and then the
# Dockerfile's stages run with its scripts in a chroot. For a site that has mirrors of Debian and PyPI, and no registry.
# The environment:
#   SECRETS  folder with ca.crt, pip.conf, apt.conf, apt.sources, each if the site needs it; as the Dockerfile's secrets
#   WHEELS   folder of wheels that the site's index does not have
#   CACHE    folder for downloads and compiled wheels, to be fast the next time
#   CUDA_ARCHITECTURES, JOBS  as in the Dockerfile
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
variant=$1 system=$(realpath -m "$2")
cache=$(realpath -m "${CACHE:-$here/../build/cache}")

work=$(mktemp -d -p "$(dirname "$system")")
trap 'rm -rf "$work"' EXIT
# The compile stages' tree, and what is at /run/build in both.
build=$work/build shared=$work/shared

fail() {
    echo "rootfs.sh: $1" >&2
    exit 2
}

pin() {
    sed -n "s/^$1=//p" "$here/versions.env"
}

# The words that a stage of the Dockerfile gives to a script: packages are listed there and nowhere else.
words() {
    local stage=$1 script=$2
    awk -v stage="$stage" -v script="/run/build/$script" '
        /^FROM / { on = $NF == stage }
        on && $1 == script { $1 = ""; print }' "$here/../Dockerfile"
}

# inside TREE SCRIPT...: a script of the Dockerfile, with that Dockerfile's mounts; they end with the namespace.
inside() {
    local tree=$1 log=$work/log mounts=("$shared:/run/build" "$secrets:/run/secrets") mount
    shift
    echo "rootfs.sh: $(basename "$tree"): $*"
    if [[ $tree == "$build" ]]; then
        mounts+=("$cache/pip:/root/.cache/pip" "$cache/compiled:/var/cache/fmengine")
    elif [[ -d $build/opt/sbom ]]; then
        mounts+=("$build/opt/sbom:/opt/sbom")
    fi
    for mount in "${mounts[@]}"; do
        mkdir -p "$tree${mount#*:}"
    done
    touch "$tree"/etc/{resolv.conf,hosts}
    # shellcheck disable=SC2016 # the inner shell's
    unshare --mount --propagation private --pid --fork bash -euc '
        tree=$1
        shift
        mount -t proc proc "$tree/proc"
        mount --rbind /dev "$tree/dev"
        while [ "$1" != -- ]; do
            mount --bind "${1%%:*}" "$tree${1#*:}"
            shift
        done
        shift
        exec env -i CUDA_ARCHITECTURES="$CUDA_ARCHITECTURES" JOBS="$JOBS" HOME=/root \
            PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin chroot "$tree" "$@"
    ' bash "$tree" "${mounts[@]}" /etc/resolv.conf:/etc/resolv.conf /etc/hosts:/etc/hosts -- "$@" >"$log" 2>&1 || {
        cat "$log" >&2
        fail "$* failed"
    }
    for mount in "${mounts[@]}"; do
        rmdir "$tree${mount#*:}"
    done
}

# The base: as Debian's slim image, without documentation.
make_base() {
    local suite options=(--mode=root --variant=minbase --aptopt='APT::Install-Recommends "false"')
    suite=$(pin "${variant^^}_BASE")
    for path in doc man info locale; do
        options+=(--dpkgopt="path-exclude=/usr/share/$path/*")
    done
    options+=(--dpkgopt='path-include=/usr/share/doc/*/copyright')
    if [[ -f $secrets/apt.sources ]]; then
        mmdebstrap --quiet "${options[@]}" "${suite,,}" "$system" "$secrets/apt.sources"
    else
        mmdebstrap --quiet "${options[@]}" "${suite,,}" "$system"
    fi
    rm -rf "${system:?}"/dev/* # a device cannot be unpacked by a user
}

# The build context, as .dockerignore has it.
share() {
    mkdir -p "$shared/wheels" "$shared/source/src" "$cache"/{pip,compiled}
    cp "$here"/scripts/* "$shared/"
    mkdir "$shared/locks"
    cp "$here"/locks/*.txt "$shared/locks/"
    cp -R "$here"/../{pyproject.toml,README.md,LICENSE} "$shared/source/"
    cp -R "$here/../src/fmengine" "$shared/source/src/"
    find "$shared/source" -name __pycache__ -prune -exec rm -rf {} +
    [[ -z ${WHEELS-} ]] || cp "$WHEELS"/*.whl "$shared/wheels/"
}

# The site's settings and traces of this machine.
forget() {
    rm -f "$system"/etc/{resolv.conf,hostname,hosts,machine-id,apt/apt.conf.d/99mmdebstrap} "$system"/etc/*-
    rm -f "$system"/etc/apt/sources.list "$system"/etc/apt/sources.list.d/*
    touch "$system"/etc/{resolv.conf,hosts,machine-id}
    rm -rf "$system"/tmp/* "$system"/var/tmp/*
}

# shellcheck disable=SC2046 # words are words
main() {
    make_base
    share
    inside "$system" /run/build/system.sh $(words "system-${stage}" system.sh)
    cp -a "$system" "$build"
    inside "$build" /run/build/system.sh $(words tools system.sh)
    inside "$build" /run/build/packages.sh "$variant"
    mkdir -p "$system/opt"
    cp -a "$build/opt/fmengine" "$system/opt/"
    inside "$system" /run/build/slim.sh

    inside "$build" /run/build/compiler.sh "$variant"
    inside "$build" /run/build/deepspeed.sh "$variant"
    [[ $variant != cuda13 ]] || inside "$build" /run/build/flash-attn.sh "$variant"
    rm -f "$shared"/wheels/*
    cp "$build"/opt/wheels/*.whl "$shared/wheels/"
    inside "$system" /run/build/wheels.sh

    install -D -m 755 "$here/../entrypoints/fmengine.sh" "$system/usr/local/bin/fmengine"
    install -D -m 755 "$here/../entrypoints/entrypoint.sh" "$system/usr/local/bin/entrypoint.sh"
    install -D -m 644 "$here/../LICENSE" "$system/usr/share/fmengine/LICENSE"
    inside "$system" /run/build/project.sh /run/build/source

    inside "$build" /run/build/sbom-tool.sh
    inside "$system" /opt/sbom/bin/python /run/build/sbom.py /opt/fmengine/bin/python /run/build/sbom.cdx.json
    install -m 644 "$shared/sbom.cdx.json" "$system/usr/share/fmengine/"
    forget
}

((UID == 0)) || fail "needs root: mmdebstrap and chroot"
[[ -n $(pin "${variant^^}_BASE") ]] || fail "VARIANT=$variant: versions.env has none of that name"
secrets=$(realpath -m "${SECRETS:-$work/secrets}")
mkdir -p "$secrets"
# cuda12 has cuda13's system
stage=${variant/cuda12/cuda13}
export CUDA_ARCHITECTURES=${CUDA_ARCHITECTURES-$(pin "${variant^^}_CUDA_ARCHITECTURES")} JOBS=${JOBS:-2}
main
