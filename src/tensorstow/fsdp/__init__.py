"""Whole models over DEVICE, HOST and DISK: FSDP2 gathers, this decides what lives where."""
