#!/usr/bin/env bash
# sif.sh VARIANT FROM IMAGE OUT.sif: the SIF of an image. FROM is where the image is and IMAGE what it is called there:
#   registry        NAME@sha256:DIGEST
#   docker-daemon   NAME:TAG; by default fmengine:VARIANT, as build.sh names it
#   docker-archive  FILE.tar, of docker save
#   oci-archive     FILE.tar, of docker buildx build --output type=oci
#   mirrors         nothing: the root file system is made here, from Debian's packages and PyPI, without any Docker
# The environment: MKSQUASHFS, more arguments of mksquashfs; for mirrors, what rootfs.sh says.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
variant=${1:?which variant: cuda13, cuda12 or cpu} from=$2 image=$3 out=$(realpath -m "$4")

fail() {
    echo "sif.sh: $1" >&2
    exit 2
}

# root that lacks capabilities, as in some virtual machines, must not ask for them
lacking() {
    local bounding
    bounding=$(awk '/^CapBnd/ { print $2 }' /proc/self/status)
    (((0x$bounding >> 24) & 1)) || echo CAP_SYS_RESOURCE
}

place=$PWD bootstrap=$from
case $from in
docker-daemon)
    image=${image:-fmengine:$variant}
    ;;
registry)
    bootstrap=docker
    ;;
docker-archive | oci-archive)
    [[ -f $image ]] || fail "IMAGE=$image: no such file; it should be the $from that FROM names"
    ;;
mirrors)
    # A name without a folder: it is written down in the SIF.
    place=$(mktemp -d -p "${TMPDIR:-/var/tmp}")
    trap 'rm -rf "$place"' EXIT
    "$here/rootfs.sh" "$variant" "$place/rootfs"
    image=rootfs bootstrap=localimage
    ;;
*)
    fail "FROM=$from: should be registry, docker-daemon, docker-archive, oci-archive or mirrors"
    ;;
esac
[[ -n $image ]] || fail "IMAGE is not set: the image's name, or file, for FROM=$from"

# -all-root: a user with no subordinate ids can unpack it, and so build on top of it.
mkdir -p "$(dirname "$out")"
cd "$place"
APPTAINER_DROP_CAPS=$(lacking) apptainer build --force --build-arg "BOOTSTRAP=$bootstrap" --build-arg "IMAGE=$image" \
    --build-arg "VARIANT=$variant" --mksquashfs-args "-all-root ${MKSQUASHFS-}" "$out" "$here/../Singularity.def"
