"""What asv runs at every commit. Nothing else of `benchmarks` is taken for a benchmark of asv."""

import sys
from pathlib import Path

ROOT = str(Path(__file__).parents[2])
if ROOT not in sys.path:  # asv imports this package by itself, as `suite`
    sys.path.append(ROOT)
