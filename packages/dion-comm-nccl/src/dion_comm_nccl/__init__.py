"""Padded transports for dion-core: fixed message sizes, no host read, on NCCL or gloo."""

from dion_comm_nccl.padded import FullShard, LocalTopRows

__all__ = ["FullShard", "LocalTopRows"]
