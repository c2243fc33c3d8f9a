"""Kernels, chosen once by an enum in the config; the choice is logged."""
