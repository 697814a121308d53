"""NumPy transcriptions of the published pseudo-code, kept apart from the package they are used to test."""
