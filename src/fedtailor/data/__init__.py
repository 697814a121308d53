"""From raw arrays to clients' batches."""

from fedtailor.data.batches import Batches, Work
from fedtailor.data.federation import Federation

__all__ = ["Batches", "Federation", "Work"]
