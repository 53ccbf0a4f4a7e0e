"""Tensors that stand for values elsewhere, and this rank's part of a DTensor."""
