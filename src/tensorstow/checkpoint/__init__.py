"""What outlives a process: commits, the way back, state dicts, safetensors."""
