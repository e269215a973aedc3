"""Computations that engine and policy share, as Triton kernels and PyTorch operations."""

import os

# Kernels are tested with products and sums fused, as all Tritons up to 3.9 compile them. Later ones will not,
# unless they are told to, and 3.9 warns of that in every process.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
