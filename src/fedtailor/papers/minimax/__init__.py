"""MINIMAX: when one model for all is best, when local training is, and FedProx in two stages between them."""
