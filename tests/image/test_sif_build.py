"""SIFs are built by whom has no subordinate ids: on top of ours, and from archives of the Docker image."""

import json

import pytest

from support.docker import Image
from support.locks import ROOT
from support.sif import Container

pytestmark = pytest.mark.image

USER = pytest.mark.parametrize("container", ["user"], indirect=True)
QUICK = ("--mksquashfs-args", "-all-root -comp zstd -Xcompression-level 1")
ON_TOP = """\
Bootstrap: localimage
From: {sif}

%post
    test "$(id -u)" = 0
    echo mine >/opt/mine
    fmengine --version
"""


@USER
def test_on_top_of_ours(container: Container) -> None:
    definition, out = container.home / "mine.def", container.home / "mine.sif"
    definition.write_text(ON_TOP.format(sif=container.sif))
    done = container.apptainer("build", *QUICK, out, definition)
    assert done.code == 0, done.text
    try:
        mine = Container(out, container.home, container.programs, container.uid)
        assert mine.execute("cat", "/opt/mine").text == "mine\n"
        found = json.loads(mine.run("doctor", "--image", "--json").text.splitlines()[-1])
        assert found["ok"]
        assert found["variant"] == "cpu"
        assert out.stat().st_uid == container.uid
    finally:
        out.unlink()


@USER
def test_from_an_oci_archive(container: Container, cpu_image: Image) -> None:
    """Since Docker 25 what `docker save` writes is one, too."""
    archive, out = container.home / "image.tar", container.home / "built.sif"
    cpu_image.docker.out("save", "--output", archive, cpu_image.name)
    archive.chmod(0o644)
    words = {"BOOTSTRAP": "oci-archive", "IMAGE": str(archive), "VARIANT": "cpu"}
    arguments = [word for name, value in words.items() for word in ("--build-arg", f"{name}={value}")]
    definition = container.home / "Singularity.def"
    definition.write_text((ROOT / "Singularity.def").read_text())
    try:
        done = container.apptainer("build", *QUICK, *arguments, out, definition)
        assert done.code == 0, done.text
        assert "image cpu: all that is needed is there" in done.text, "%test ran at the end of the build"
        built = Container(out, container.home, container.programs, container.uid)
        assert built.run("--version").text == container.run("--version").text
    finally:
        archive.unlink()
        out.unlink(missing_ok=True)
