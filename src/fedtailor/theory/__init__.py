"""The papers' constants and step sizes."""
