"""Where completions come from: the native engine, vLLM, transformers, and those that plug in."""
