"""PARTIAL: FedAvg-P and Scaffold-P, a shared and a personal part."""
