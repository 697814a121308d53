"""Data of one's own: a torch Dataset per client, a loader, a mapping of columns with a column that says whose row it is.

fedtailor run ditto datasets.py:columns --rounds 5
"""

import numpy as np
import torch
from made import clients
from torch.utils.data import DataLoader, Dataset

import fedtailor as ft


class Ward(Dataset):
    """Examples one by one."""

    def __init__(self, x, y):
        self.x, self.y = x, y

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        return torch.from_numpy(self.x[i]), int(self.y[i])


def columns():
    """All rows in one mapping, as a Hugging Face dataset has them; on the command line it is dealt out, or has client=."""
    pairs = clients()
    return {"x": np.concatenate([x for x, _ in pairs]), "label": np.concatenate([y for _, y in pairs])}


def main():
    wards = {f"ward {i}": Ward(x, y) for i, (x, y) in enumerate(clients())}
    by_ward = ft.Federation.from_datasets(wards)  # each is split into train, validation and test
    print(by_ward, ft.run(ft.Ditto(lam=0.1), by_ward, rounds=5).summary["acc_personal"])

    loaders = [DataLoader(Ward(x, y), batch_size=8, shuffle=True) for x, y in clients()]
    print(ft.Federation.from_datasets(loaders))

    owner = np.repeat([f"site {i}" for i in range(6)], 40)
    by_site = ft.Federation.from_datasets({**columns(), "site": owner}, client="site")
    print(by_site, by_site.names)


if __name__ == "__main__":
    main()
