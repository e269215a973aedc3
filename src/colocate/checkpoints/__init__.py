"""What a run leaves behind: sealed checkpoints, the state in them, uploads; and how it stops in order."""
