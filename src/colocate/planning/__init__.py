"""Planning of how a run trains within a device's memory, and of how much of it the run will take."""
