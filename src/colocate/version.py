"""The version, where every room can read it; packages and images take theirs from here."""

__version__ = "0.1.0"
