"""CLUP: FedCLUP, the degree of personalisation lam, and what accuracy costs in rounds."""
