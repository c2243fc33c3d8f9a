"""What the cpu image is made of: labels, the list of its parts, and nothing of the machine that built it."""

import json
import re
import socket
import tarfile
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from support.docker import HARDENED, Image
from support.locks import LOCKS, ROOT, read_lock

pytestmark = pytest.mark.image

PUBLIC = {"deb.debian.org", "pypi.org", "files.pythonhosted.org"}
SELF_TESTS = "libgnutls.so."
"""Has keys in it that are in its public source, to test itself with."""
PRIVATE_KEY = re.compile(rb"-----BEGIN (?:[A-Z]+ )*PRIVATE KEY-----\n[A-Za-z0-9+/=]{40}")


@pytest.fixture(scope="module")
def archive(cpu_image: Image, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`docker save`, unpacked."""
    folder = tmp_path_factory.mktemp("archive")
    cpu_image.docker.out("save", "--output", folder / "image.tar", cpu_image.name)
    with tarfile.open(folder / "image.tar") as tar:
        tar.extractall(folder, filter="data")
    (folder / "image.tar").unlink()
    return folder


def layers(archive: Path) -> list[Path]:
    manifest = json.loads((archive / "manifest.json").read_text())[0]
    return [archive / layer for layer in manifest["Layers"]]


def contents(archive: Path) -> Iterator[tuple[str, bytes]]:
    """Name and bytes of every file of every layer, those included that a later layer hides; then of the metadata."""
    for layer in layers(archive):
        with tarfile.open(layer) as tar:
            for member in tar:
                file = tar.extractfile(member) if member.isfile() else None
                yield member.name, file.read() if file else member.linkname.encode()
    for file in archive.rglob("*.json"):
        yield file.name, file.read_bytes()


def forbidden(image: Image) -> list[bytes]:
    """The secrets' mark, this machine's name and mirrors, and lines of each certificate that is not Debian's."""
    words = [image.mark, str(ROOT)]
    words += [socket.gethostname()] if len(socket.gethostname()) > 5 else []  # a shorter one is part of many words
    settings = "".join((image.secrets / name).read_text() for name in ("pip.conf", "apt.sources"))
    words += [
        host for url in re.findall(r"https?://\S+", settings) if (host := urlsplit(url).hostname or "") not in PUBLIC
    ]
    for certificate in Path("/usr/local/share/ca-certificates").glob("**/*.crt"):
        words += certificate.read_text().splitlines()[1:4]
    return [word.encode() for word in words]


def test_no_layer_has_a_secret_or_a_name_of_this_machine(cpu_image: Image, archive: Path) -> None:
    pattern = re.compile(b"|".join(map(re.escape, forbidden(cpu_image))))
    found, seen = [], 0
    for name, data in contents(archive):
        seen += 1
        key = None if Path(name).name.startswith(SELF_TESTS) else PRIVATE_KEY.search(data)
        found += [(name, match[0]) for match in [pattern.search(data), key] if match]
        if name.removeprefix("./") in ("etc/hostname", "etc/resolv.conf", "etc/hosts"):
            found += [(name, data)] if data else []
    assert found == []
    assert seen > 10_000


def test_no_layer_has_what_a_build_leaves_behind(archive: Path) -> None:
    """Folders that a step mounts, caches and logs; what the base has already is the base's."""
    left = r"run/.+|opt/(?!fmengine(/|$)).+|root/.+|tmp/.+|var/(log|cache)/.+|var/lib/apt/lists/.+|.*-old"
    names = []
    for layer in layers(archive)[1:]:
        with tarfile.open(layer) as tar:
            names += [member.name for member in tar if not member.isdir()]
    assert len(names) > 10_000
    assert [name for name in names if re.fullmatch(left, name) and not Path(name).name.startswith(".wh.")] == []


def test_the_sbom_is_what_pip_and_dpkg_say(cpu_image: Image) -> None:
    inside = cpu_image.out("/bin/cat", "/usr/share/fmengine/sbom.cdx.json", options=HARDENED)
    assert inside == cpu_image.sbom.read_text(), "the same inside and beside the image"
    bom = json.loads(inside)
    assert bom["bomFormat"] == "CycloneDX"
    listed = {(part["purl"].split("/")[0], part["name"], part["version"]) for part in bom["components"]}
    pip = json.loads(cpu_image.out("/opt/fmengine/bin/python", "-m", "pip", "list", "--format", "json"))
    expected = {("pkg:pypi", package["name"], package["version"]) for package in pip}
    dpkg = cpu_image.out("/usr/bin/dpkg-query", "-W", "-f", "${db:Status-Status} ${Package} ${Version}\n")
    for status, name, version in map(str.split, dpkg.splitlines()):
        expected |= {("pkg:deb", name, version)} if status == "installed" else set()
    assert listed == expected


def test_the_packages_are_those_of_the_lock(cpu_image: Image) -> None:
    pip = json.loads(cpu_image.out("/opt/fmengine/bin/python", "-m", "pip", "list", "--format", "json"))
    found = {re.sub(r"[-_.]+", "-", package["name"]).lower(): package["version"] for package in pip}
    locked = {
        requirement.name: requirement.version
        for file in ("cpu.txt", "cpu-torch.txt")
        for requirement in read_lock(LOCKS / file).values()
    }
    assert found.keys() - locked.keys() == {"pip", "fmengine"}
    assert {name: version for name, version in found.items() if name in locked} == locked


def test_labels(cpu_image: Image) -> None:
    labels = cpu_image.docker.inspect(cpu_image.name)["Config"]["Labels"]
    assert labels["org.opencontainers.image.title"] == "FMEngine"
    assert labels["org.opencontainers.image.licenses"] == "Apache-2.0"
    assert labels["fmengine.variant"] == "cpu"
    version = cpu_image.out("--version").split()[-1]
    assert labels["org.opencontainers.image.version"] == version
    assert re.fullmatch(r"[0-9a-f]{40}|", labels["org.opencontainers.image.revision"])


def test_no_compiler_is_in_it(cpu_image: Image) -> None:
    looked = "for name in cc gcc g++ c++ clang nvcc make git curl wget; do command -v $name && exit 1; done; true"
    assert cpu_image.out("shell", "-c", looked) == ""


def test_nothing_in_it_is_for_everybody_to_change(cpu_image: Image) -> None:
    """But the folders that are meant for it."""
    search = "find / -xdev -perm -0002 ! -type l ! -type c 2>/dev/null || true"
    writable = cpu_image.out("shell", "-c", search, options=["--read-only", "--network", "none"]).split()
    assert set(writable) <= {"/tmp", "/var/tmp", "/workspace", "/run/lock"}
