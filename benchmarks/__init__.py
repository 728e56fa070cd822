"""Measurements behind figures in the documentation."""
