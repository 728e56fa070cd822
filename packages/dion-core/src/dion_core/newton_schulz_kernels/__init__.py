"""Triton kernels of Newton-Schulz, imported only where there is a GPU for them; `listing` needs nothing."""
