"""The examples of docs/command-line.md: each command runs and prints what the page shows.

`python -m tests.unit.test_command_line_docs` puts what they print now into the page. A block marked "varies" depends on
the machine: its commands run, and print what they like.
"""

import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dion_core.cli.app import app

PAGE = Path(__file__).parents[2] / "docs" / "command-line.md"
BLOCK = re.compile(r"^```console(?P<varies> varies)?\n\$ dion (?P<command>[^\n]*)\n(?P<shown>.*?)^```$", re.M | re.S)
BLOCKS = list(BLOCK.finditer(PAGE.read_text(encoding="utf-8")))


def printed(command: str) -> str:
    """What a command prints, without spaces at the ends of lines."""
    result = CliRunner().invoke(app, shlex.split(command))
    assert result.exit_code in (0, 1 if command == "doctor" else 0), result.output
    return re.sub(r" +$", "", result.stdout, flags=re.M)


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block["command"])
def test_the_page_shows_what_is_printed(block: re.Match[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = printed(block["command"])
    assert text
    if not block["varies"]:
        assert text == block["shown"]


def test_every_command_has_an_example() -> None:
    shown = {block["command"].split()[0] for block in BLOCKS}
    assert shown == {command.callback.__name__ for command in app.registered_commands if command.callback is not None}


def renewed(block: re.Match[str]) -> str:
    if block["varies"]:
        return block[0]
    return f"```console\n$ dion {block['command']}\n{printed(block['command'])}```"


if __name__ == "__main__":
    PAGE.write_text(BLOCK.sub(renewed, PAGE.read_text(encoding="utf-8")), encoding="utf-8")
