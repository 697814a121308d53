"""From raw arrays to clients' batches: what a federation is, where it comes from, how it is dealt and how it is fed."""

from __future__ import annotations

from fedtailor.data import shift
from fedtailor.data.batches import Batches, Work
from fedtailor.data.federation import Federation
from fedtailor.data.readers.datasets import from_datasets
from fedtailor.data.readers.shards import from_shards
from fedtailor.data.readers.text import from_texts
from fedtailor.data.sources import load
from fedtailor.data.tables import from_folder, from_table

__all__ = ["Batches", "Federation", "Work", "shift"]

# Readers make federations, so ``federation.py`` cannot import them: their constructors join the class here, above both. Python
# imports this package before any module in it, so whoever has the class has them too.
Federation.from_table = staticmethod(from_table)
Federation.from_folder = staticmethod(from_folder)
Federation.from_texts = staticmethod(from_texts)
Federation.from_datasets = staticmethod(from_datasets)
Federation.from_shards = staticmethod(from_shards)
Federation.load = staticmethod(load)
