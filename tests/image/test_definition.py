"""Apptainer's definition and the way without Docker say what the Dockerfile says. Offline; no image is needed."""

import re

import pytest

from support.locks import ROOT

DOCKERFILE = (ROOT / "Dockerfile").read_text().replace("\\\n", " ")
DEFINITION = (ROOT / "Singularity.def").read_text()
ROOTFS = (ROOT / "containers/rootfs.sh").read_text()


def section(name: str) -> str:
    """The lines of a section of the definition, without its comments."""
    found = re.search(rf"^%{name}$\n(.*?)(?=^%|\Z)", DEFINITION, re.MULTILINE | re.DOTALL)
    assert found, name
    return "\n".join(line.strip() for line in found[1].splitlines() if not line.strip().startswith("#")).strip()


def stage(name: str) -> str:
    """The instructions of a stage of the Dockerfile."""
    found = re.search(rf"^FROM \S+ AS {name}$\n(.*?)(?=^FROM |\Z)", DOCKERFILE, re.MULTILINE | re.DOTALL)
    assert found, name
    return found[1]


def variables(text: str, keyword: str) -> dict[str, str]:
    """All NAME=VALUE of the lines that begin with a keyword; the variant is `VARIANT` in both files."""
    words = [word for line in text.splitlines() if line.startswith(keyword) for word in line.split()[1:]]
    text = "\n".join(words).replace("${VARIANT}", "VARIANT").replace("{{VARIANT}}", "VARIANT")
    return dict(word.split("=", 1) for word in text.splitlines())


def test_the_environment_is_dockers() -> None:
    docker = variables(stage("runtime"), "ENV ")
    apptainer = variables(section("environment").replace("{{ VARIANT }}", "{{VARIANT}}"), "export ")
    assert docker["FMENGINE_IMAGE"] == "VARIANT"
    assert {name: apptainer.get(name) for name in docker} == docker
    assert apptainer.keys() - docker.keys() == {"LC_ALL"}, "the host's comes through, and would win over LANG"


def test_the_first_program_is_dockers() -> None:
    program = re.findall(r'^ENTRYPOINT \["tini", "--", "(\S+)"\]$', DOCKERFILE, re.MULTILINE)
    place = re.findall(r"^COPY \S+ entrypoints/entrypoint.sh (\S+)$", DOCKERFILE, re.MULTILINE)
    assert place[0].endswith(f"/{program[0]}")
    assert section("runscript") == f'exec {place[0]} "$@"'


def test_the_definition_installs_nothing() -> None:
    for name in ("post", "setup", "files", "pre"):
        assert not re.search(rf"^%{name}\b", DEFINITION, re.MULTILINE)
    assert re.search(r"^From: \{\{ IMAGE \}\}$", DEFINITION, re.MULTILINE)


def test_without_docker_the_same_scripts_run() -> None:
    """Each script that a stage runs, with the same arguments; packages are read from the Dockerfile."""
    docker = {
        re.sub(r'"\$\{VARIANT\}"', '"$variant"', command)
        for command in re.findall(r" (/run/build/\S+\.sh(?: [^\n]*)?)$", DOCKERFILE, re.MULTILINE)
        if "system.sh" not in command
    }
    ours = {command.strip() for command in re.findall(r"inside \S+ (/run/build/[^\n]*)", ROOTFS)}
    assert len(docker) >= 8
    assert docker - ours == set()
    for stage_name in ('"system-${stage}"', "tools"):
        assert f"/run/build/system.sh $(words {stage_name} system.sh)" in ROOTFS


@pytest.mark.parametrize("script", ["entrypoint.sh", "fmengine.sh"])
def test_without_docker_the_same_programs_are_installed(script: str) -> None:
    place = re.findall(rf"^COPY \S+ entrypoints/{script} (\S+)$", DOCKERFILE, re.MULTILINE)
    assert f'entrypoints/{script}" "$system{place[0]}"' in ROOTFS
