"""The floor: errors, sizes, cores and directories. Knows neither torch nor the native core."""
