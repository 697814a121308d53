"""The ten laws every method obeys, ours and a user's, and what a module must keep for them to hold."""

from fedtailor.laws.check import Verdict, check_algorithm
from fedtailor.laws.model import check_model

__all__ = ["Verdict", "check_algorithm", "check_model"]
