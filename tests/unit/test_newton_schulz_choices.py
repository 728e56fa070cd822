"""Choices depend on device name and shape, and on nothing else."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest

from dion_core.newton_schulz_kernels import choices
from dion_core.newton_schulz_kernels.choices import DEFAULT, SMALL, Choice, choose


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    rows = [
        {"batch": 8, "m": 1280, "n": 5120, "choice": asdict(Choice(band=2))},
        {"batch": 24, "m": 384, "n": 1536, "choice": asdict(SMALL)},
    ]
    path = tmp_path / "choices.json"
    path.write_text(json.dumps({"known": rows}), encoding="utf-8")
    monkeypatch.setattr(choices, "MEASURED", path)
    for cached in (choose, choices._measured):
        cached.cache_clear()
    yield
    for cached in (choose, choices._measured):
        cached.cache_clear()


@pytest.mark.usefixtures("measured")
def test_the_nearest_measured_shape_decides() -> None:
    assert choose("known", 8, 1280, 5120) == Choice(band=2)
    assert choose("known", 6, 1536, 4096) == Choice(band=2)
    assert choose("known", 12, 512, 1536) == SMALL


@pytest.mark.usefixtures("measured")
def test_an_unknown_device_takes_the_default() -> None:
    assert choose("unknown", 8, 1280, 5120) == DEFAULT
    assert choose("unknown", 96, 384, 5120) == SMALL
    assert choose("unknown", 3, 1536, 1664) == SMALL  # with tiles of two blocks some processors would have no work


def test_the_stored_choices_can_be_read() -> None:
    for device, rows in json.loads(choices.MEASURED.read_text(encoding="utf-8")).items():
        for row in rows:
            assert choose(device, row["batch"], row["m"], row["n"]) == Choice(**row["choice"])
