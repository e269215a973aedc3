"""Kernels of a decoding step: attention over the KV cache, and the draw of the next token."""
