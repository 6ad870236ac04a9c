"""What the data pipeline takes from Grain: the iterator protocol and nothing beneath it."""

from grain import DatasetIterator, IterDataset

__all__ = ["DatasetIterator", "IterDataset"]
