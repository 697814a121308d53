"""The ten laws every method obeys, ours and a user's."""

from fedtailor.laws.check import Verdict, check_algorithm

__all__ = ["Verdict", "check_algorithm"]
