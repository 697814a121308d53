"""Sites in one process: messages are taken apart and put together again, but go nowhere."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedtailor.data.federation import Federation
from fedtailor.errors import FedtailorError
from fedtailor.sites.agreed import Agreed
from fedtailor.sites.memory import Memory
from fedtailor.sites.site import Site
from fedtailor.sites.wire import Parcel


@dataclass(frozen=True, eq=False)
class InProcess:
    """A transport to sites in this process, by client."""

    sites: Mapping[str, Site]
    name: str = "sites"

    @staticmethod
    def of(agreed: Agreed, federation: Federation, folder: Path) -> InProcess:
        """Return a site for every client of a federation, their states below ``folder``."""
        own = {name: federation.take(np.array([i])) for i, name in enumerate(federation.names)}
        return InProcess(
            {name: Site(agreed.at_site(rows), Memory(folder / str(i))) for i, (name, rows) in enumerate(own.items())}
        )

    def ask(self, parcels: Mapping[str, Parcel], seconds: float) -> Mapping[str, Parcel | str]:
        """Return every site's reply."""
        replies: dict[str, Parcel | str] = {}
        for name, parcel in parcels.items():
            try:
                replies[name] = Parcel.joined(*self.sites[name].answer(Parcel.joined(*parcel.split())).split())
            except FedtailorError as error:
                replies[name] = str(error)
        return replies
