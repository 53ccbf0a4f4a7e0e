"""``stow``: whole models on FSDP2, with shards on DEVICE, HOST or DISK."""
