"""FLOW: Panchal et al. (2023)."""
