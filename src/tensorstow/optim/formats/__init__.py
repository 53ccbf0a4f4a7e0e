"""Which bits a state has in memory: streams of each format, to fp32 and back."""
