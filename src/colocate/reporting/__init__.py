"""What a run tells: its record, the terminal, reports and trackers."""
