"""Errors, sizes, tiers, plans and cores: what needs no native core."""
