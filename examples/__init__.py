"""Whole programs to run from the repository's root."""
