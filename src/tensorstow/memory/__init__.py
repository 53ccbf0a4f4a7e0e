"""What every manager of memory on a bounded tier has: its bytes, its order of use, its states."""
