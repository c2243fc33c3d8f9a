#!/bin/sh
# mirrors.sh: this machine's mirrors of Debian, as apt's settings name them, one a line; the archive's comes first.
set -eu
for file in /etc/apt/sources.list /etc/apt/sources.list.d/debian.sources; do
    [ ! -f "$file" ] || sed -n 's/^URIs: *//p; s/^deb \(\[[^]]*\] \)\{0,1\}\([^ ]*\).*/\2/p' "$file"
done | awk '!seen[$0]++'
