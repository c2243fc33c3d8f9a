"""Kernels, chosen once when the model is built; the choice is logged."""
