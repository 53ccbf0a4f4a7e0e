"""What the doors of several projects need: tables of keywords, devices, and construction."""
