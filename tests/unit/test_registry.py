"""Discovery of transports by entry point, and the choice of one, against distributions made up for the test."""

import logging
import sys
from collections.abc import Callable
from importlib.metadata import EntryPoints, distributions
from pathlib import Path

import pytest
import torch

from dion_core import registry
from dion_core.collectives import SoloGroup
from dion_core.layout import Axis, split_layout
from dion_core.registry import Choice, available_transports, check_axes, choose_transport
from dion_core.transport import INTERFACE_VERSION, Bucket, Transport, TransportError

MODULE = """
from dion_core.layout import Axis
from dion_core.transport import Transport

class {name}(Transport):
    interface_version = {version}
    scopes = frozenset({scopes})
    default_scope = {scopes}[0]
    axes = frozenset({{Axis.ROWS}})

    def open(self, buckets):
        raise NotImplementedError
"""

Install = Callable[..., str]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Installs one more distribution with one transport, and returns what its entry point names."""
    monkeypatch.syspath_prepend(tmp_path)
    made = []

    def add(
        entry: str,
        scopes: tuple[str, ...] = ("global",),
        *,
        version: object = INTERFACE_VERSION,
        source: str = MODULE,
        value: str | None = None,
    ) -> str:
        module = f"fake_transport_{len(made)}"
        made.append(module)
        name = entry.capitalize()
        (tmp_path / f"{module}.py").write_text(source.format(name=name, scopes=scopes, version=version))
        information = tmp_path / f"fake_{len(made)}-1.0.dist-info"
        information.mkdir()
        (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: fake-{len(made)}\nVersion: 1.0\n")
        value = value or f"{module}:{name}"
        (information / "entry_points.txt").write_text(f"[dion.transports]\n{entry} = {value}\n")
        return value

    yield add
    for module in made:
        sys.modules.pop(module, None)


@pytest.fixture
def alone(install: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """`install`, in an environment where nothing else is installed."""

    def entry_points(*, group: str) -> EntryPoints:
        found = [entry for each in distributions(path=[str(tmp_path)]) for entry in each.entry_points]
        return EntryPoints(entry for entry in found if entry.group == group)

    monkeypatch.setattr(registry, "entry_points", entry_points)
    return install


def test_a_distribution_on_the_path_is_found_by_name(install: Install) -> None:
    install("made_up", ("all", "local"))
    found = available_transports()
    assert list(found) == sorted(found)
    assert {"full", "local", "made_up"} <= set(found)
    assert found["made_up"].__name__ == "Made_up"
    assert found["made_up"].default_scope == "all"


def test_a_name_is_taken_with_default_options(alone: Install) -> None:
    alone("made_up")
    choice = choose_transport("made_up", frozenset({"global"}), chooses_rows=True)
    assert choice.name == "made_up"
    assert type(choice.transport) is available_transports()["made_up"]
    assert "by name" in choice.reason


def test_an_instance_is_taken_as_it_is(alone: Install) -> None:
    alone("made_up")
    transport = available_transports()["made_up"]()
    choice = choose_transport(transport, frozenset({"global"}), chooses_rows=True)
    assert choice.transport is transport
    assert choice.name == "Made_up"


def test_nothing_installed(alone: Install) -> None:
    assert available_transports() == {}
    with pytest.raises(TransportError, match=r"installed: none\); `pip install dion-comm-nccl` brings 'full'"):
        choose_transport("auto", frozenset(), chooses_rows=True)


@pytest.mark.parametrize(
    ("name", "package"),
    [
        ("full", "dion-comm-nccl"),
        ("local", "dion-comm-nccl"),
        ("capped", "dion-comm-capped"),
        ("varlen", "dion-comm-varlen"),
    ],
)
def test_a_known_name_that_is_not_installed_comes_with_its_pip_command(alone: Install, name: str, package: str) -> None:
    alone("made_up")
    alone("other")
    with pytest.raises(TransportError) as caught:
        choose_transport(name, frozenset(), chooses_rows=True)
    assert f"transport={name!r} is not installed (installed: made_up, other)" in str(caught.value)
    assert f"pip install {package}" in str(caught.value)


def test_an_unknown_name_lists_what_is_installed_and_known(alone: Install) -> None:
    alone("made_up")
    with pytest.raises(TransportError) as caught:
        choose_transport("cappd", frozenset(), chooses_rows=True)
    assert "transport='cappd' is not installed (installed: made_up)" in str(caught.value)
    assert "'capped'" in str(caught.value)


def test_a_name_taken_twice(alone: Install) -> None:
    first, second = alone("made_up"), alone("made_up")
    with pytest.raises(TransportError) as caught:
        available_transports()
    for text in ("'made_up' is installed twice", first, second):
        assert text in str(caught.value)


def test_one_installation_seen_twice_is_no_conflict(alone: Install) -> None:
    """As when a source tree and its installed metadata are both on the path."""
    value = alone("made_up")
    alone("made_up", value=value)
    assert list(available_transports()) == ["made_up"]


@pytest.mark.parametrize("version", [INTERFACE_VERSION - 1, INTERFACE_VERSION + 1])
def test_another_interface_version(alone: Install, version: int) -> None:
    value = alone("made_up", version=version)
    with pytest.raises(TransportError) as caught:
        available_transports()
    for text in ("'made_up'", value, f"interface version {version}", f"has {INTERFACE_VERSION}"):
        assert text in str(caught.value)


def test_an_entry_that_fails_to_import(alone: Install) -> None:
    value = alone("made_up", source="import a_module_that_nobody_has\n")
    with pytest.raises(TransportError) as caught:
        available_transports()
    for text in ("'made_up'", value, "cannot be imported", "a_module_that_nobody_has"):
        assert text in str(caught.value)
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)


def test_an_entry_that_names_nothing(alone: Install) -> None:
    alone("made_up", value="fake_transport_0:Absent")
    with pytest.raises(TransportError, match=r"'made_up' .*fake_transport_0:Absent.* cannot be imported"):
        available_transports()


@pytest.mark.parametrize("source", ["class Made_up: pass\n", "Made_up = 3\n"])
def test_what_is_not_a_transport(alone: Install, source: str) -> None:
    value = alone("made_up", source=source)
    with pytest.raises(TransportError) as caught:
        available_transports()
    for text in ("'made_up'", value, "not a dion_core Transport class"):
        assert text in str(caught.value)


@pytest.mark.parametrize(
    ("installed", "taken"),
    [
        (("full", "varlen", "capped"), "capped"),
        (("varlen", "full"), "varlen"),
        (("full", "another"), "full"),
    ],
)
def test_auto_takes_the_best_and_says_so_once(
    alone: Install, caplog: pytest.LogCaptureFixture, installed: tuple[str, ...], taken: str
) -> None:
    for name in installed:
        alone(name, ("global",) if name == "capped" else ("global", "all"))
    with caplog.at_level(logging.INFO, logger="dion_core"):
        choice = choose_transport("auto", frozenset(), chooses_rows=True)
    assert choice.name == taken
    [record] = caplog.records
    assert taken in record.getMessage()
    assert choice.reason in record.getMessage()


def test_auto_for_all_rows_passes_over_what_chooses(alone: Install) -> None:
    alone("capped", ("global",))
    alone("full", ("global", "all"))
    assert choose_transport("auto", frozenset({"all"}), chooses_rows=False).name == "full"


def test_auto_takes_a_local_choice_only_where_it_is_asked_for(alone: Install) -> None:
    alone("local", ("local",))
    assert choose_transport("auto", frozenset({"local"}), chooses_rows=True).name == "local"
    with pytest.raises(TransportError, match="pip install dion-comm-nccl"):
        choose_transport("auto", frozenset(), chooses_rows=True)


def test_all_rows_are_refused_by_what_chooses(alone: Install) -> None:
    """`Muon(transport="capped")` names what serves all rows."""
    alone("capped", ("global",))
    alone("full", ("global", "all"))
    alone("varlen", ("global", "all"))
    with pytest.raises(ValueError, match="all rows, which this optimizer applies") as caught:
        choose_transport("capped", frozenset({"all"}), chooses_rows=False)
    message = str(caught.value)
    assert "transport='capped'" in message
    assert "it serves global" in message
    assert message.endswith("full, varlen")


@pytest.mark.parametrize("as_instance", [False, True])
def test_a_scope_that_is_not_served(alone: Install, as_instance: bool) -> None:
    alone("full", ("global", "all"))
    alone("local", ("local",))
    full = available_transports()["full"]() if as_instance else "full"
    with pytest.raises(ValueError, match="does not serve scope local; it serves all, global") as caught:
        choose_transport(full, frozenset({"local"}), chooses_rows=True)
    assert str(caught.value).endswith("local")


def test_a_scope_that_nothing_serves(alone: Install) -> None:
    alone("capped", ("global",))
    with pytest.raises(ValueError, match="none"):
        choose_transport("capped", frozenset({"local"}), chooses_rows=True)
    with pytest.raises(ValueError, match="none of capped serves scope local"):
        choose_transport("auto", frozenset({"local"}), chooses_rows=True)


def test_the_scope_asked_for_goes_before_the_default(alone: Install) -> None:
    alone("full", ("global", "all"))
    choice = choose_transport("full", frozenset(), chooses_rows=True)
    assert choose_transport(choice, {"global"}, chooses_rows=True) is choice


def bucket(axis: Axis) -> Bucket:
    layout = split_layout(SoloGroup(), axis, (4, 3))
    return Bucket(layout, (0,), 4, 4, torch.float32, torch.device("cpu"), "bucket")


def test_an_axis_that_is_not_served(alone: Install) -> None:
    alone("made_up")
    made: Transport = available_transports()["made_up"]()
    choice = Choice("made_up", made, "for the test")
    check_axes(choice, [bucket(Axis.ROWS)])
    with pytest.raises(ValueError, match="'made_up' does not serve matrices split by columns") as caught:
        check_axes(choice, [bucket(Axis.ROWS), bucket(Axis.COLUMNS)])
    assert bucket(Axis.COLUMNS).describe() in str(caught.value)
    assert "rows" in str(caught.value)
