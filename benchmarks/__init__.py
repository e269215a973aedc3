"""What is measured, and how: `python -m benchmarks.<room>.<name>`, from the root of the repository."""
