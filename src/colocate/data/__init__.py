"""From a dataset to the prompts of each step: loading, chat templates, the order of prompts, packing."""
