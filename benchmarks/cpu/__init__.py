"""What is measured on a CPU: kernels, disks, steps of the seed example."""
