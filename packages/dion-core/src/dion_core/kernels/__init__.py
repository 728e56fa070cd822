"""Triton kernels, imported only where there is a GPU for them: one file for each module of definitions."""
