"""A run: its parts are built, checked, connected and saved."""
