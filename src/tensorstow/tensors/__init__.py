"""Placeholders for values without memory, and this rank's part of a DTensor."""
