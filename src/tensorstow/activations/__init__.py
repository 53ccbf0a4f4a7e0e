"""Tensors that autograd saves for backward, in host memory or on disk."""
