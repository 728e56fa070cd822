"""The capped transport for dion-core: exact global choice in pooled messages of fixed size, no host read."""

from dion_comm_capped.capped import Capped

__all__ = ["Capped"]
