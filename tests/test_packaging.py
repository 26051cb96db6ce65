from __future__ import annotations

import subprocess
import sys
from importlib.metadata import distribution, distributions, entry_points
from importlib.util import find_spec
from pathlib import Path
from zipfile import ZipFile

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("store", "engine", "replay", "turnlog")
NAMES = (*PACKAGES, "migrations")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> ZipFile:
    folder = tmp_path_factory.mktemp("wheel")
    build = "import sys, hatchling.build; hatchling.build.build_wheel(sys.argv[1])"
    subprocess.run([sys.executable, "-c", build, str(folder)], cwd=ROOT, check=True, capture_output=True)
    (path,) = folder.glob("turnlog-*.whl")
    return ZipFile(path)


def test_no_other_distribution_claims_one_of_our_import_names() -> None:
    claims = {
        (other.name, name)
        for other in distributions()
        if other.name.lower() != "turnlog"
        for name in {Path(str(file)).parts[0].removesuffix(".py") for file in other.files or []}
        if name in NAMES
    }
    assert not claims


def test_all_packages_come_from_one_place() -> None:
    specs = {name: find_spec(name) for name in PACKAGES}
    places = {name: Path(str(spec.origin)).parents[1] for name, spec in specs.items() if spec is not None}
    assert places == dict.fromkeys(PACKAGES, places["turnlog"])


def test_the_wheel_holds_the_packages_and_nothing_else(wheel: ZipFile) -> None:
    tops = {name.split("/")[0] for name in wheel.namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == set(PACKAGES)


def test_the_wheel_holds_every_data_file_and_migration(wheel: ZipFile) -> None:
    packed = set(wheel.namelist())
    data = {
        path.relative_to(ROOT).as_posix()
        for package in PACKAGES
        for pattern in ("*.sql", "*.jinja", "*.css", "*.svg")
        for path in (ROOT / package).rglob(pattern)
    }
    migrations = {
        f"store/{path.relative_to(ROOT).as_posix()}"
        for pattern in ("*.py", "*.mako", "*.sql")
        for path in (ROOT / "migrations").rglob(pattern)
    }
    assert any(name.endswith(".sql") for name in data)
    assert "store/migrations/env.py" in migrations
    assert data | migrations <= packed


def test_the_wheel_names_the_command_and_the_plug_in(wheel: ZipFile) -> None:
    (name,) = [name for name in wheel.namelist() if name.endswith("entry_points.txt")]
    text = wheel.read(name).decode()
    assert "[console_scripts]\nturnlog = turnlog.cli:main" in text
    assert "[vllm.endpoint_plugins]\nturnlog = engine.plugin:Plugin" in text


def test_the_installed_plug_in_loads_and_is_what_the_server_looks_for() -> None:
    (entry,) = entry_points(group="vllm.endpoint_plugins", name="turnlog")
    plugin = entry.load()()
    assert plugin.name == "turnlog"
    assert callable(plugin.attach_router)
    assert callable(plugin.init_state)


def test_the_installed_version_is_the_one_in_the_project_file() -> None:
    assert f'version = "{distribution("turnlog").version}"' in (ROOT / "pyproject.toml").read_text()
