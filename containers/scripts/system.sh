#!/bin/sh
# system.sh PACKAGE...: Debian packages; leaves nothing of apt and dpkg that differs from one build to the next.
# A site's mirror, settings and CA are in the build secrets apt.sources, apt.conf and ca.crt, where it has any.
set -eu

secrets=/run/secrets
if [ -f $secrets/apt.conf ]; then
    export APT_CONFIG=$secrets/apt.conf
fi

apt() {
    # The secrets are root's alone, and apt else fetches as another user.
    set -- -o APT::Sandbox::User=root -o Acquire::Languages=none "$@"
    if [ -f $secrets/ca.crt ]; then
        set -- -o Acquire::https::CAInfo=$secrets/ca.crt "$@"
    fi
    if [ -f $secrets/apt.sources ]; then
        set -- -o Dir::Etc::SourceList=$secrets/apt.sources -o Dir::Etc::SourceParts=/dev/null "$@"
    fi
    DEBIAN_FRONTEND=noninteractive apt-get -qq "$@"
}

apt update
apt install --yes --no-install-recommends "$@" >/dev/null

rm -rf /var/lib/apt/lists/* /var/cache/apt/* /var/cache/debconf/* /var/cache/ldconfig/* /var/log/apt /var/log/*.log \
    /var/lib/dpkg/*-old /etc/*-
