"""Commits, resume, state dicts and safetensors of an optimizer, on one rank or several."""
