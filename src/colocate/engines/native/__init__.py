"""The native engine: decodes with the trainer's own parameters and lends its KV cache's memory."""
