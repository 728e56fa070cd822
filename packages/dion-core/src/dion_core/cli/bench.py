"""`dion bench`."""
from typing import Annotated
import typer
def bench(as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False) -> None:
    """x"""
