"""What engine and policy compute alike."""

import os

# Kernels are tested with products and sums fused, as all Tritons up to 3.9 compile them. Later ones will not,
# unless they are told to, and 3.9 warns of that in every process.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
