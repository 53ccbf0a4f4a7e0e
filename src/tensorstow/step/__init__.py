"""One step: which parameters take part, when updates run, and how gradients get there."""
