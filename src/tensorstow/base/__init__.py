"""Errors, sizes, tiers, plans and cores: what needs neither torch nor the native core."""
