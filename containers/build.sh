#!/usr/bin/env bash
# build.sh VARIANT [OPTION...]: builds the image of a variant, and puts its SBOM into build/images/. The options go to
# `docker buildx build`: --network host, --no-cache, --platform linux/arm64 ...
#
# Variables:
#   IMAGE     its name; by default fmengine:VARIANT
#   BASE      another base image than that of versions.env
#   SECRETS   a folder with any of ca.crt, pip.conf, apt.conf and apt.sources: what the build needs and no layer keeps
#   WHEELS    a folder of wheels that the index of pip.conf does not have
#   JOBS      compilers at a time; by default 2
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)

variant=${1:?which variant: cuda13, cuda12 or cpu}
shift
image=${IMAGE:-fmengine:$variant}
pin() { sed -n "s/^$1=//p" "$root/containers/versions.env"; }

name=$(pin "${variant^^}_BASE")
if [ -z "$name" ]; then
    echo "error: no variant $variant in containers/versions.env" >&2
    exit 2
fi
base=$(pin "$name")

arguments=(
    --build-arg "VARIANT=$variant"
    --build-arg "BASE=${BASE:-$base}"
    --build-arg "CUDA_ARCHITECTURES=$(pin "${variant^^}_CUDA_ARCHITECTURES")"
    --build-arg "JOBS=${JOBS:-2}"
    --build-arg "VERSION=$(sed -n 's/^__version__ = "\(.*\)"$/\1/p' "$root/src/fmengine/__init__.py")"
)
# A base that stands in has no name and digest that somebody else could look up.
if [ -z "${BASE-}" ]; then
    arguments+=(--build-arg "BASE_NAME=${base%@*}" --build-arg "BASE_DIGEST=${base#*@}")
fi
if revision=$(git -C "$root" rev-parse HEAD 2>/dev/null); then
    arguments+=(--build-arg "REVISION=$revision" --build-arg "CREATED=$(git -C "$root" log -1 --format=%cI)")
fi
for secret in ca.crt pip.conf apt.conf apt.sources; do
    if [ -n "${SECRETS-}" ] && [ -f "$SECRETS/$secret" ]; then
        arguments+=(--secret "id=$secret,src=$SECRETS/$secret")
    fi
done
if [ -n "${WHEELS-}" ]; then
    arguments+=(--build-context "wheels=$WHEELS")
fi

docker buildx build "${arguments[@]}" "$@" --target image --tag "$image" --load "$root"
mkdir -p "$root/build/images/$variant"
docker buildx build "${arguments[@]}" "${@/#--no-cache/--pull=false}" --target sbom-file \
    --output "type=local,dest=$root/build/images/$variant" "$root"
echo "$image: $(docker image inspect --format '{{.Size}}' "$image" | awk '{ printf "%.0f MB", $1 / 1e6 }'), its parts in" \
    "build/images/$variant/sbom.cdx.json"
