"""Comparison of a bundle with the torch reference."""
