"""Matrix products, with the gates and adapters that are fused with them."""
