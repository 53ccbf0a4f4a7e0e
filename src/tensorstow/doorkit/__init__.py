"""What the interfaces of other projects need: tables of keywords, devices, and construction."""
