"""Placeholders for values that are elsewhere, and this rank's part of a DTensor."""
