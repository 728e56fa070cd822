"""Transports for dion-core that send exactly the chosen rows; sizes are read on the host once a step."""

from dion_comm_varlen.varlen import Uniform, Varlen

__all__ = ["Uniform", "Varlen"]
