"""Names that TRL's scripts import besides the trainer: argument classes, their parser, and helpers."""
