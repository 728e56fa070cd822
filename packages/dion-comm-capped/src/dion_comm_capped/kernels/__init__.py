"""Triton kernels with the names of the definitions in `admission` and `places`."""
