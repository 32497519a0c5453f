"""Exact attention over the kept blocks."""
