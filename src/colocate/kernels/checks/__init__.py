"""Whether the fast kernels work on this device and these versions, and what takes their place."""
