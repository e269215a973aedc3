"""Functions and classes of users (rewards, tools, environments): called with limits, and blamed by name."""
