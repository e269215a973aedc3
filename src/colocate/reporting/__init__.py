"""Reporting of a run: its record, the terminal, reports and trackers."""
