"""Triton kernels. Nothing here is imported before it is used on a GPU: the library works where triton is missing."""
