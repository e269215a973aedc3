"""Runs on a cluster that Ray manages: ranks are placed, started, watched and begun again."""
