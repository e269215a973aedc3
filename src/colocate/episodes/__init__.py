"""What happens between a prompt and its reward when a completion has several turns."""
