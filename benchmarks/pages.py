"""Tables that commands put into pages of the documents, between two marks."""

from __future__ import annotations

import argparse
from pathlib import Path

DOCS = Path(__file__).parent.parent / "docs"


def publish(text: str, page: Path, mark: str, *, description: str | None) -> None:
    """Prints the text, and with --write on the command line puts it between the marks of that name in the page."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help=f"put it into {page.name}")
    write = parser.parse_args().write
    print(text)
    if write:
        begin, end = f"<!-- {mark}: begin -->\n", f"<!-- {mark}: end -->"
        before, rest = page.read_text(encoding="utf-8").split(begin)
        page.write_text(before + begin + text + end + rest.split(end, 1)[1], encoding="utf-8")
