"""Orthonormal optimizers for distributed training: Muon, NorMuon, Dion2 and NorDion2 (Dion3)."""

from dion_core.collectives import TransportError
from dion_core.declared import DeclaredShard
from dion_core.foreign import import_state_dict
from dion_core.layerwise import LayerWise
from dion_core.optimizers import Dion2, Dion3, Muon, NorDion2, NorMuon
from dion_core.param_groups import param_groups_for
from dion_core.registry import available_transports

__version__ = "0.1.0"

__all__ = [
    "DeclaredShard",
    "Dion2",
    "Dion3",
    "LayerWise",
    "Muon",
    "NorDion2",
    "NorMuon",
    "TransportError",
    "available_transports",
    "import_state_dict",
    "param_groups_for",
]
