"""Optimizers whose states are stowed: layout, kernels' rule, pipeline, and torch's interface."""
