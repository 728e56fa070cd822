"""The matrices of the models that benchmarks measure and the command line plans for, by name."""

from __future__ import annotations

Inventory = dict[tuple[int, int], int]
"""How many matrices there are of each (rows, columns)."""

INVENTORIES: dict[str, Inventory] = {
    "5120x8": {(5120, 5120): 33, (20480, 5120): 16},
    "1b": {(1536, 1536): 96, (6656, 1536): 48, (1536, 6656): 24},
    "14b": {(5120, 5120): 160, (17920, 5120): 80, (5120, 17920): 40},
}
