"""PERADA: Xie et al. (2024)."""
