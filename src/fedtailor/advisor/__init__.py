"""What is known about the methods, found by running them."""

from fedtailor.advisor.card import Card, Parcel, card, cards

__all__ = ["Card", "Parcel", "card", "cards"]
