"""Tensors that stand for values elsewhere, and what this rank has of a sharded one."""
