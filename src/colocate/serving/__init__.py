"""An OpenAI-compatible service over the open engine: HTTP in front, one thread with the engine behind."""
