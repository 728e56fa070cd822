"""The command `dion`: what is installed, what is missing, what a step would cost, and how fast this machine is.

Needs typer and rich, which `dion-core[cli]` brings; the rest of the package does without.
"""

from __future__ import annotations

import sys

INSTALL = "pip install 'dion-core[cli]'"
"""The command that brings what the command line needs."""


def main() -> None:
    """Runs the command line; without typer or rich it says how to get them, and ends with code 2."""
    try:
        import rich  # noqa: F401
        import typer  # noqa: F401
    except ImportError as error:
        print(f"dion: the command line needs {error.name}, which is not installed: {INSTALL}", file=sys.stderr)
        sys.exit(2)
    from dion_core.cli.app import app

    app()
