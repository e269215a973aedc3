"""The model that is trained: forward, backward, optimizer, and their memory."""
