"""One step: which parameters take part, the schedules, and how gradients reach the update."""
