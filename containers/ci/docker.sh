#!/usr/bin/env bash
# docker.sh start FOLDER: a real dockerd with BuildKit for a Debian machine that has none, with no systemd and nothing of
# /etc/apt changed; prints the variables to set. It lives in FOLDER, and stays there for the next start.
# docker.sh stop FOLDER: stops it and unmounts what it leaves.
#
# Debian trixie's dockerd 26 runs on bookworm too: its programs need no newer glibc. runc is the machine's own.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)

action=${1:?start or stop} folder=$(realpath -m "${2:?which folder}")
socket=$folder/docker.sock
if ((${#socket} > 100)); then
    echo "error: $folder: too long a name for a socket in it" >&2
    exit 2
fi
export PATH=$folder/root/usr/bin:$folder/root/usr/sbin:$PATH
export DOCKER_CONFIG=$folder/config DOCKER_HOST=unix://$socket

# Packages of trixie, from the mirror that this machine has, through an apt state of our own.
unpack() {
    local mirror options debs=$folder/apt/debs
    mirror=$("$here/mirrors.sh" | head -n 1)
    mkdir -p "$folder"/apt/{lists,cache}/partial "$folder"/apt/cache/archives/partial "$debs"
    echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $mirror trixie main" >"$folder/apt/sources.list"
    options=(-o "Dir::State::Lists=$folder/apt/lists" -o "Dir::Cache=$folder/apt/cache" -o APT::Sandbox::User=root
        -o "Dir::Etc::SourceList=$folder/apt/sources.list" -o Dir::Etc::SourceParts=/dev/null
        -o Dir::Etc::Preferences=/dev/null -o Dir::Etc::PreferencesParts=/dev/null -o Acquire::Languages=none)
    apt-get "${options[@]}" -qq update
    (cd "$debs" && apt-get "${options[@]}" -qq download docker.io docker-cli docker-buildx containerd)
    for deb in "$debs"/*.deb; do
        dpkg-deb -x "$deb" "$folder/root"
    done
    rm -rf "$folder/apt"
    mkdir -p "$folder/config/cli-plugins"
    ln -sfn "$folder/root/usr/libexec/docker/cli-plugins/docker-buildx" "$folder/config/cli-plugins/docker-buildx"
}

# What dockerd starts: of the machine's own release.
install_helpers() {
    command -v runc >/dev/null && command -v tini-static >/dev/null && command -v iptables >/dev/null && return
    apt-get -qq update
    apt-get -qq install --yes --no-install-recommends runc tini iptables >/dev/null
}

start() {
    install_helpers >&2
    [ -x "$folder/root/usr/sbin/dockerd" ] || unpack >&2
    if ! docker version >/dev/null 2>&1; then
        # No bridge and no rules of iptables: a container has the host's network or none.
        setsid "$folder/root/usr/sbin/dockerd" --data-root "$folder/data" --exec-root "$folder/exec" \
            --pidfile "$folder/docker.pid" --host "$DOCKER_HOST" --bridge=none --iptables=false --ip6tables=false \
            --init-path "$(command -v tini-static)" >"$folder/dockerd.log" 2>&1 </dev/null &
        for _ in {1..120}; do
            docker version >/dev/null 2>&1 && break
            sleep 0.5
        done
    fi
    if ! docker version >&2; then
        tail -n 20 "$folder/dockerd.log" >&2
        exit 1
    fi
    printf 'PATH=%s\nDOCKER_CONFIG=%s\nDOCKER_HOST=%s\n' "$PATH" "$DOCKER_CONFIG" "$DOCKER_HOST"
}

stop() {
    if [ -f "$folder/docker.pid" ]; then
        local pid
        pid=$(cat "$folder/docker.pid")
        kill "$pid" 2>/dev/null || true
        while kill -0 "$pid" 2>/dev/null; do
            sleep 0.2
        done
    fi
    awk -v folder="$folder/" 'index($2, folder) == 1 { print $2 }' /proc/mounts | sort -r | xargs -r umount
}

case $action in
start) start ;;
stop) stop ;;
*)
    echo "error: $action: start or stop" >&2
    exit 2
    ;;
esac
