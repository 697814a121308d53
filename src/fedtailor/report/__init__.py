"""Results as a page to read."""
