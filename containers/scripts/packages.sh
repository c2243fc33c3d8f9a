#!/bin/sh
# packages.sh VARIANT: the venv with every package of the variant's lock that PyPI, or a folder of wheels, has as a wheel.
set -eu
# shellcheck source=containers/scripts/pip.sh
. "$(dirname "$0")/pip.sh"

python3 -m venv "$venv"
python=$venv/bin/python
if [ -f "$locks/$1-torch.txt" ]; then
    install_locked "$python" "$locks/$1-torch.txt"
fi
but deepspeed "$locks/$1.txt" >/tmp/lock.txt
install_locked "$python" /tmp/lock.txt
rm /tmp/lock.txt
