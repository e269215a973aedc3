"""Memory: the arena, its hand-over between phases, offload, recovery, and what of it was used when."""
