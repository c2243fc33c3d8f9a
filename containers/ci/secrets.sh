#!/usr/bin/env bash
# secrets.sh SUITE FOLDER: writes this machine's settings of pip and apt, and its CA, as the secrets of a build.
set -euo pipefail

suite=${1:?which suite of Debian} folder=${2:?which folder}
mkdir -p "$folder"

# A setting of pip: a variable comes before the files. Folders of this machine mean nothing in a build.
setting() {
    local variable=PIP_${1^^}
    variable=${variable//-/_}
    echo "${!variable:-$(python3 -m pip config get "global.$1" 2>/dev/null)}" | xargs -rn 1 | grep -v '^file:' | xargs -r
}
{
    echo "[global]"
    for key in index-url extra-index-url trusted-host timeout; do
        value=$(setting "$key") || true
        [ -z "$value" ] || echo "$key = $value"
    done
} >"$folder/pip.conf"

certificate=${PIP_CERT:-${SSL_CERT_FILE:-/etc/ssl/certs/ca-certificates.crt}}
[ ! -f "$certificate" ] || cp "$certificate" "$folder/ca.crt"

apt-config dump | grep -E '^Acquire::(Check|https?::Proxy)' >"$folder/apt.conf" || true

for mirror in $("$(dirname "$0")/mirrors.sh"); do
    suites="$suite $suite-updates"
    case $mirror in *security*) suites=$suite-security ;; esac
    printf 'Types: deb\nURIs: %s\nSuites: %s\nComponents: main\nSigned-By: %s\n\n' \
        "$mirror" "$suites" /usr/share/keyrings/debian-archive-keyring.gpg
done >"$folder/apt.sources"
