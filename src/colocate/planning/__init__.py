"""What a run will take of a device's memory, and how it trains within it."""
