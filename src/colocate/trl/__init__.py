"""Names that TRL's trainer and scripts have besides GRPOTrainer and GRPOConfig."""
