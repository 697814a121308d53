"""Sites in one process: messages are taken apart and put together again, but go nowhere."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedtailor.data.federation import Federation
from fedtailor.errors import FedtailorError
from fedtailor.sites.agreed import Agreed
from fedtailor.sites.masks import new_signer
from fedtailor.sites.memory import Memory
from fedtailor.sites.secure import SUMS, Seat
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
        keys = {name: new_signer() for name in federation.names} if agreed.pact is not None else {}
        peers = {name: public for name, (_, public) in keys.items()}
        sites = {}
        for i, name in enumerate(federation.names):
            rows, memory = federation.take(np.array([i])), Memory(folder / str(i))
            desk = Memory(folder / str(i) / SUMS)
            seat = None if agreed.pact is None else Seat(name, agreed.pact, desk, keys[name][0], peers)
            sites[name] = Site(agreed.at_site(rows), memory, seat=seat)
        return InProcess(sites)

    def ask(self, parcels: Mapping[str, Parcel], seconds: float) -> Mapping[str, Parcel | str]:
        """Return every site's reply."""
        replies: dict[str, Parcel | str] = {}
        for name, parcel in parcels.items():
            try:
                replies[name] = Parcel.joined(*self.sites[name].answer(Parcel.joined(*parcel.split())).split())
            except FedtailorError as error:
                replies[name] = str(error)
        return replies
