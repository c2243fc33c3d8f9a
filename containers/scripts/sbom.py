"""`sbom.py PYTHON OUT`: CycloneDX's list of the packages of a Python environment, with Debian's packages added."""

import json
import subprocess
import sys
from pathlib import Path
from urllib.parse import quote

TOOL = Path(sys.executable).parent / "cyclonedx-py"
FIELDS = "${Package}\t${Version}\t${Architecture}\t${Maintainer}\t${db:Status-Status}\n"


def debian_components() -> list[dict[str, str]]:
    """A component for each installed package of dpkg."""
    release = dict(line.split("=", 1) for line in Path("/etc/os-release").read_text().splitlines() if "=" in line)
    distro = f"debian-{release['VERSION_ID'].strip(chr(34))}"
    listed = subprocess.run(["dpkg-query", "-W", "-f", FIELDS], capture_output=True, text=True, check=True).stdout
    components = []
    for line in listed.splitlines():
        name, version, architecture, maintainer, status = line.split("\t")
        if status == "installed":
            url = f"pkg:deb/debian/{quote(name)}@{quote(version)}?arch={architecture}&distro={distro}"
            component = {"type": "library", "bom-ref": url, "name": name, "version": version, "purl": url}
            components.append({**component, "publisher": maintainer})
    return components


def main() -> None:
    """Write the list; the same environment gives the same bytes."""
    python, out = sys.argv[1:]
    command = [TOOL, "environment", "--output-reproducible", "--output-format", "JSON", python]
    bom = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    bom["components"] = sorted(
        [*bom["components"], *debian_components()], key=lambda component: component.get("purl") or component["bom-ref"]
    )
    Path(out).write_text(json.dumps(bom, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
