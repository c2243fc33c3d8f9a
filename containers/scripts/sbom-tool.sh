#!/bin/sh
# sbom-tool.sh: CycloneDX's tool, in a venv that no image has.
set -eu
# shellcheck source=containers/scripts/pip.sh
. "$(dirname "$0")/pip.sh"

python3 -m venv /opt/sbom
mkdir -p /run/build/wheels
install_locked /opt/sbom/bin/python "$locks/sbom.txt"
