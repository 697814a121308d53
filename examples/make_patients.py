"""Writes patients.csv: 900 made-up patients of eight hospitals, whose risks follow a common law and each hospital's own."""

from __future__ import annotations

from pathlib import Path

from fedtailor.data.made_up import patients

if __name__ == "__main__":
    patients().to_csv(Path(__file__).with_name("patients.csv"), index=False)
