from pathlib import Path

import pytest

from fmengine.start.clean import clean
from support.machines import bound_at, machine


def test_a_clean_environment_stays() -> None:
    result = clean({"HOME": "/nonexistent", "PATH": "/usr/bin", "LD_LIBRARY_PATH": "/.singularity.d/libs"}, machine())
    assert result.changes == {"PYTHONNOUSERSITE": "1"}
    assert (result.cut, result.restart) == ([], False)


@pytest.mark.parametrize("name", ["PYTHONPATH", "PYTHONHOME", "PYTHONUSERBASE", "PYTHONSTARTUP"])
def test_pythons_variables(name: str) -> None:
    result = clean({name: "/host/lib"}, machine(ignores_environment=False))
    assert result.changes[name] is None
    assert result.cut == [f"{name}=/host/lib"]
    assert result.restart
    assert not clean({name: "/host/lib"}, machine(ignores_environment=True)).restart
    empty = clean({name: ""}, machine(ignores_environment=False))
    assert (empty.changes[name], empty.cut, empty.restart) == (None, [], False)


def test_packages_of_the_users_home(tmp_path: Path) -> None:
    folder = tmp_path / ".local/lib/python3.13/site-packages"
    assert clean({"HOME": str(tmp_path)}, machine()).cut == []
    folder.mkdir(parents=True)
    result = clean({"HOME": str(tmp_path)}, machine())
    assert (result.cut, result.restart) == ([str(folder)], False)
    assert clean({"HOME": str(tmp_path)}, machine(uses_user_site=True)).restart
    assert clean({"HOME": str(tmp_path), "FMENGINE_CACHES": "/tmp/x"}, machine()).cut == []  # said by the parent


def test_conda_and_its_place_in_path() -> None:
    environ = {
        "CONDA_PREFIX": "/home/me/conda/envs/x",
        "CONDA_SHLVL": "1",
        "_CE_CONDA": "",
        "PATH": "/home/me/conda/envs/x/bin:/usr/bin:/home/me/conda/envs/x2/bin",
    }
    result = clean(environ, machine())
    assert {name for name, value in result.changes.items() if value is None} == {
        "CONDA_PREFIX",
        "CONDA_SHLVL",
        "_CE_CONDA",
    }
    assert result.changes["PATH"] == "/usr/bin:/home/me/conda/envs/x2/bin"
    assert result.cut == ["CONDA_PREFIX=/home/me/conda/envs/x"]
    assert clean({"CONDA_SHLVL": "0"}, machine()).cut == ["CONDA_SHLVL"]


def test_a_virtual_environment() -> None:
    assert clean({"VIRTUAL_ENV": "/home/me/venv"}, machine()).cut == ["VIRTUAL_ENV=/home/me/venv"]
    assert clean({"VIRTUAL_ENV": "/opt/fmengine"}, machine()).cut == []  # the image's


def test_library_paths_of_the_host(tmp_path: Path) -> None:
    value = f"{tmp_path}:/nowhere/lib:/usr/lib:/.singularity.d/libs:/usr/local/nvidia/lib64"
    result = clean({"LD_LIBRARY_PATH": value}, machine(mounts=bound_at(tmp_path)))
    assert result.changes["LD_LIBRARY_PATH"] == "/usr/lib:/.singularity.d/libs:/usr/local/nvidia/lib64"
    assert result.cut == [f"LD_LIBRARY_PATH={tmp_path}:/nowhere/lib"]
    assert result.restart  # the loader has searched there


def test_what_a_site_profile_binds_stays(tmp_path: Path) -> None:
    environ = {"LD_LIBRARY_PATH": f"{tmp_path}/cxi/lib", "FMENGINE_HOST_LIBRARIES": f"/other:{tmp_path}/cxi"}
    assert "LD_LIBRARY_PATH" not in clean(environ, machine(mounts=bound_at(tmp_path))).changes


def test_a_path_that_is_not_there_needs_no_restart() -> None:
    result = clean({"LD_LIBRARY_PATH": "/nowhere/lib", "LD_PRELOAD": "/nowhere/libx.so"}, machine())
    assert result.changes["LD_LIBRARY_PATH"] is None
    assert result.changes["LD_PRELOAD"] is None
    assert not result.restart
    assert len(result.cut) == 2


def test_preloaded_libraries(tmp_path: Path) -> None:
    evil = tmp_path / "libevil.so"
    evil.touch()
    result = clean(
        {"LD_PRELOAD": f"{evil} /.singularity.d/libs/libx.so:libbare.so"}, machine(mounts=bound_at(tmp_path))
    )
    assert result.changes["LD_PRELOAD"] == "/.singularity.d/libs/libx.so"
    assert result.cut == [f"LD_PRELOAD={evil}:libbare.so"]
    assert result.restart


def test_the_current_folder_is_no_library_path() -> None:
    result = clean({"LD_LIBRARY_PATH": ":/.singularity.d/libs"}, machine())
    assert (result.changes["LD_LIBRARY_PATH"], result.cut, result.restart) == ("/.singularity.d/libs", [], True)
    assert clean({"LD_LIBRARY_PATH": ""}, machine()).changes["LD_LIBRARY_PATH"] is None


def test_a_link_counts_as_what_it_leads_to(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("/usr")
    environ = {"LD_LIBRARY_PATH": f"{tmp_path}/link/lib"}
    assert "LD_LIBRARY_PATH" not in clean(environ, machine(mounts=bound_at(tmp_path))).changes
    assert "LD_LIBRARY_PATH" in clean(environ, machine(mounts=bound_at(Path("/usr")))).changes
