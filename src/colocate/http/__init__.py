"""Parts that both sides of our HTTP connections share: keys, signed messages, leases."""
