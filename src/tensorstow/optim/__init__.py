"""Optimizers with torch's interface whose states are on any tier."""
