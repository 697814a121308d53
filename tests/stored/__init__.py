"""Summaries and run directories written by an earlier version: what they hold must still come out, and be read."""
