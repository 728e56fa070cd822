"""`python -m dion_core.cli` is `dion`."""

from dion_core.cli import main

main()
