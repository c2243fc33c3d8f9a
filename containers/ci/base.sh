#!/usr/bin/env bash
# base.sh SUITE NAME: makes a Debian root file system from this machine's mirror and imports it into Docker as NAME, to
# stand in for Debian's own slim image where no registry can be had. Like there, documentation is left out; it has no
# package sources (a build is given them as a secret), and nothing of this machine is in it.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)

suite=${1:?which suite of Debian} name=${2:?the name of the image}
if ! command -v mmdebstrap >/dev/null; then
    apt-get -qq update
    apt-get -qq install --yes --no-install-recommends mmdebstrap >/dev/null
fi
mirror=$("$here/mirrors.sh" | head -n 1)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

cat >"$work/clean" <<'CLEAN'
#!/bin/sh
set -eu
rm -f "$1/etc/apt/sources.list" "$1/etc/apt/apt.conf.d/99mmdebstrap" "$1"/etc/*-
rm -rf "$1"/var/lib/apt/lists/* "$1"/var/cache/apt/* "$1"/var/cache/ldconfig/* "$1"/var/log/* "$1"/var/lib/dpkg/*-old
: >"$1/etc/hostname"
: >"$1/etc/resolv.conf"
CLEAN
chmod +x "$work/clean"

mmdebstrap --quiet --mode=root --variant=minbase --skip=output/dev --include=debian-archive-keyring \
    --aptopt='Acquire::Check-Valid-Until "false"' \
    --dpkgopt='path-exclude=/usr/share/doc/*' --dpkgopt='path-include=/usr/share/doc/*/copyright' \
    --dpkgopt='path-exclude=/usr/share/man/*' --dpkgopt='path-exclude=/usr/share/locale/*' \
    --customize-hook="$work/clean" "$suite" "$work/base.tar" "deb $mirror $suite main" >&2
docker import "$work/base.tar" "$name" >/dev/null
