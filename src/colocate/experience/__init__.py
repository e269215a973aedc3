"""From completions to optimizer steps: rewarded, compared, weighted, and queued for the policy."""
