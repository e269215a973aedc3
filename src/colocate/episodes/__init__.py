"""Episodes: the turns, tools and environments between a prompt and its reward."""
