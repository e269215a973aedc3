"""How much of a device's memory a run will take, and how it trains within that memory."""
