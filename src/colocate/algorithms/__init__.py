"""The arithmetic of GRPO: advantages, losses, importance sampling, entropy."""
