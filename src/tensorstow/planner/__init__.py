"""What a run will hold, move and wait for: arithmetic over sizes and rates, nothing measured."""
