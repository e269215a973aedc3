"""What both sides of an HTTP connection of ours stand on: keys, signed messages, leases."""
