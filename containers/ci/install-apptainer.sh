#!/usr/bin/env bash
# Installs Apptainer from Debian's packages, on Debian 12 as root, and prints its version: for CI and developers; a cluster
# has its own. Debian has it in sid only, and sid's needs a newer C library: it gets one of its own, in a private folder.
# Nothing in /etc/apt changes, and nothing else is upgraded.
set -euo pipefail

# What Apptainer runs, what `make sif FROM=mirrors` needs, and what edits the package.
TOOLS=(squashfs-tools squashfuse fuse-overlayfs fuse2fs uidmap e2fsprogs mmdebstrap patchelf)
# sid's libraries that the two programs are linked to: package, then file.
LIBRARIES=(libc6:ld-linux-x86-64.so.2 libc6:libc.so.6 libc6:libm.so.6 libc6:libresolv.so.2 libc6:libpthread.so.0
    libc6:libdl.so.2 libseccomp2:libseccomp.so.2 libsqlite3-0:libsqlite3.so.0)
PROGRAMS=(usr/bin/apptainer usr/lib/x86_64-linux-gnu/apptainer/bin/starter)
PRIVATE=/usr/lib/x86_64-linux-gnu/apptainer/private

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# apt that knows sid, in a folder of its own, from the mirror that this machine uses
sid() {
    apt-get -qq -o Dir::State::Lists="$work/lists" -o Dir::Cache="$work/cache" -o Dir::Etc::SourceList="$work/sources.list" \
        -o Dir::Etc::SourceParts=/dev/null -o Dir::Etc::Preferences=/dev/null -o Dir::Etc::PreferencesParts=/dev/null \
        -o Acquire::Languages=none -o Acquire::Check-Valid-Until=false -o APT::Sandbox::User=root "$@"
}

download() {
    local mirror
    mirror=$("$(dirname "$0")/mirrors.sh" | head -n 1)
    mkdir -p "$work"/{lists/partial,cache/archives/partial,debs}
    echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $mirror sid main" >"$work/sources.list"
    sid update
    (cd "$work/debs" && sid download apptainer libc6 libseccomp2 libsqlite3-0)
}

# The package with the programs bound to the private libraries, and without the dependencies that these take the place of.
repack() {
    local entry package program
    dpkg-deb -R "$work"/debs/apptainer_*.deb "$work/package"
    mkdir -p "$work/package$PRIVATE"
    for package in libc6 libseccomp2 libsqlite3-0; do
        dpkg-deb -x "$work"/debs/${package}_*.deb "$work/$package"
    done
    for entry in "${LIBRARIES[@]}"; do
        find "$work/${entry%%:*}" -name "${entry#*:}" -exec cp -L {} "$work/package$PRIVATE/" \; -quit
    done
    for program in "${PROGRAMS[@]}"; do
        patchelf --set-interpreter "$PRIVATE/ld-linux-x86-64.so.2" --force-rpath --set-rpath "$PRIVATE" "$work/package/$program"
    done
    sed -i -E -e 's/^Version: .*/&+private1/' -e '/^(Static-)?Built-Using:/d' \
        -e '/^Depends:/{s/(libc6|libseccomp2|libsqlite3-0) \([^)]*\),? ?//g; s/, *$//}' "$work/package/DEBIAN/control"
    rm -f "$work/package/DEBIAN/md5sums"
    dpkg-deb --root-owner-group -Znone -b "$work/package" "$work/apptainer.deb" >/dev/null
}

# Root that lacks a capability, as in some virtual machines, must not ask for all of them, which is the default.
fit_capabilities() {
    local last
    last=$(cat /proc/sys/kernel/cap_last_cap)
    if (((0x$(awk '/^CapBnd/ { print $2 }' /proc/self/status) & (1 << (last + 1)) - 1) != (1 << (last + 1)) - 1)); then
        apptainer config global --set "root default capabilities" file
    fi
}

if ! command -v apptainer >/dev/null; then
    {
        apt-get -qq update
        apt-get -qq install -y --no-install-recommends "${TOOLS[@]}"
        download
        repack
        apt-get -qq install -y --no-install-recommends "$work/apptainer.deb"
    } >"$work/log" 2>&1 || {
        cat "$work/log" >&2
        exit 1
    }
    fit_capabilities
fi
chmod 666 /dev/fuse # as udev has it: what users other than root mount a SIF with
apptainer version
