"""What is measured on an accelerator, a simulated one, or the CPU in its place."""
