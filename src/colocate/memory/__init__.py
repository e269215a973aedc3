"""Memory: the arena, its hand-over between phases, offload, recovery, and measurements."""
