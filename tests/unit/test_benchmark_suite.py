"""What asv finds in benchmarks/, for which transports, and that it builds and installs all packages of a commit."""

import json
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from asv.config import Config

from benchmarks import launched, packages, vendor
from benchmarks.shared_environment import is_of_project, link_packages
from benchmarks.suite.replaying import Clock, figures_of
from dion_core.registry import available_transports

ROOT = Path(__file__).parents[2]
TRANSPORT = """
from dion_core.layout import Axis
from dion_core.transport import INTERFACE_VERSION, Transport

class MadeUp(Transport):
    interface_version = INTERFACE_VERSION
    scopes = frozenset({"global"})
    default_scope = "global"
    axes = frozenset({Axis.ROWS})

    def open(self, buckets):
        raise NotImplementedError
"""
DISCOVER = """
import sys
sys.path[:0] = {folders}
from asv_runner.discovery import list_benchmarks
list_benchmarks({suite!r}, sys.stdout)
"""


def test_asv_finds_the_suite_alone_for_whatever_transports_are_installed(tmp_path: Path) -> None:
    (tmp_path / "made_up.py").write_text(TRANSPORT)
    information = tmp_path / "made_up-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: made-up\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text("[dion.transports]\nmade_up = made_up:MadeUp\n")
    program = DISCOVER.format(folders=[str(tmp_path), *sys.path], suite=str(ROOT / "benchmarks" / "suite"))
    printed = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, check=True, capture_output=True, text=True)
    found = {each["name"]: each for each in json.loads(printed.stdout)}
    assert all(name.startswith("bench_") for name in found), sorted(found)
    kinds = {name.rsplit(".", 1)[-1].split("_")[0] for name in found}
    assert kinds == {"time", "track", "peakmem"}
    expected = [repr(name) for name in sorted([*available_transports(), "made_up"])]
    with_transports = [each for each in found.values() if "transport" in each["param_names"]]
    assert len(with_transports) > 10
    for each in with_transports:
        assert each["params"][each["param_names"].index("transport")] == expected, each["name"]


@pytest.mark.parametrize(
    "environment",
    [
        {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1"},
        {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_LOCAL_RANK": "1"},
        {"PMI_RANK": "3", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1", "SLURM_PROCID": "0", "SLURM_NTASKS": "1"},
        {"SLURM_PROCID": "3", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1"},
        {"PMI_RANK": "3", "PMI_SIZE": "8", "SLURM_PROCID": "3", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1"},
    ],
)
def test_ranks_are_those_that_the_launcher_names(environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*launched._LOCAL_NAMES, *(name for names in launched._NAMES for name in names)):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(RuntimeError, match="names no rank"):
        launched.place()
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert launched.place() == (3, 8, 1)


def test_figures_of_a_cell_are_taken_skipped_or_failed() -> None:
    measured = {"full tiny 2 0.25": {"bytes": 5}, "full tiny 4 0.25": {"error": "rank 1 died"}}
    assert figures_of(measured, ("full", "tiny", 2, 0.25)) == {"bytes": 5}
    with pytest.raises(RuntimeError, match="rank 1 died"):
        figures_of(measured, ("full", "tiny", 4, 0.25))
    with pytest.raises(NotImplementedError):
        figures_of(measured, ("full", "tiny", 8, 0.25))


def test_a_clock_shows_what_was_measured() -> None:
    clock = Clock()
    before = clock()
    clock.advance(0.25)
    assert clock() - before == 0.25


def test_asv_keeps_wheels_in_a_folder_of_its_cache() -> None:
    settings = Config.load(str(ROOT / "asv.conf.json"))
    wheels = "{build_cache_dir}/wheels"
    assert [command.split()[-1] for command in settings.build_command] == [wheels]
    assert wheels in settings.install_command[0]
    assert settings.benchmark_dir == "benchmarks/suite"


def test_every_package_of_a_tree_becomes_a_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that another commit has not."""
    for name in ("dion-core", "dion-comm-made-up"):
        module = tmp_path / "tree" / "packages" / name / "src" / name.replace("-", "_")
        module.mkdir(parents=True)
        (module / "__init__.py").write_text("")
        text = (ROOT / "packages" / "dion-core" / "pyproject.toml").read_text(encoding="utf-8")
        text = re.sub(r"^(readme|license-files) = .*\n", "", text, flags=re.MULTILINE)
        text = text.replace("dion-core", name).replace("dion_core", name.replace("-", "_"))
        (tmp_path / "tree" / "packages" / name / "pyproject.toml").write_text(text)
    wheels = tmp_path / "wheels"
    packages.build(tmp_path / "tree", wheels)
    made = {wheel.name.split("-")[0]: zipfile.ZipFile(wheel).namelist() for wheel in wheels.glob("*.whl")}
    assert made.keys() == {"dion_core", "dion_comm_made_up"}
    assert all(f"{name}/__init__.py" in files for name, files in made.items())
    with pytest.raises(SystemExit, match="no packages"):
        packages.build(tmp_path / "wheels", wheels)


def test_all_packages_of_this_tree_are_built_and_those_installed_are_removed() -> None:
    assert [path.name for path in packages.sources(ROOT)] == sorted(path.name for path in (ROOT / "packages").iterdir())
    assert "dion-core" in packages.installed()
    assert set(packages.installed()) <= {path.name for path in packages.sources(ROOT)}


def test_a_shared_environment_has_everything_but_this_project(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    foreign = ["torch", "numpy", "dion", "dionysus", "zlib.pth", "asv_runner-0.3.2.dist-info"]
    ours = [
        "dion_core",
        "dion_comm_capped-0.1.0.dist-info",
        "_editable_impl_dion_core.pth",
        "__editable__.dion_comm_nccl-0.1.0.pth",
        "_dion_comm_varlen.pth",
    ]
    for name in foreign + ours:
        (source / name).mkdir(parents=True)
    target.mkdir()
    link_packages(source, target)
    assert sorted(path.name for path in target.iterdir()) == sorted(foreign)
    assert all(is_of_project(name) for name in ours)


def test_a_page_of_asv_loads_nothing_from_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vendor, "fetched", lambda library, kept: _written(tmp_path / library.file, library.package))
    import asv

    (tmp_path / "site").mkdir()
    copy = tmp_path / "site" / "index.html"
    copy.write_bytes((Path(asv.__file__).parent / "www" / "index.html").read_bytes())
    vendor.vendor(copy)
    text = copy.read_text(encoding="utf-8")
    assert not re.search(r'(src|href)="https?://[^"]*\.(js|css)"', text)
    assert "integrity" not in text
    for library in vendor.LIBRARIES:
        assert f'"{library.file}"' in text
        assert (copy.parent / library.file).read_text() == library.package
    copy.write_text('<script src="https://example.org/other.js"></script>')
    with pytest.raises(ValueError, match=r"other\.js"):
        vendor.vendor(copy)


def test_a_library_with_another_hash_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vendor, "_from_npm", lambda library: b"something else")
    with pytest.raises(ValueError, match="sha256"):
        vendor.fetched(vendor.LIBRARIES[0], tmp_path)
    assert not list(tmp_path.rglob("*.js"))


def _written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path
