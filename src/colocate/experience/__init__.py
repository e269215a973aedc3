"""From prompts to optimizer steps: completions are requested, rewarded, compared, weighted and queued."""
