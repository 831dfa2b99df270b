"""Measurements: how fast, how much memory, how many graphs."""
