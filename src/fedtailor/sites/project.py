"""The folders of a network: the server's, and one for every site, which is all that the site needs.

NAME/config.toml says what is trained, NAME/schema.toml what tables look like; NAME/server/ has the certificates, NAME/sites/SITE/
a copy of both files, the authority's certificate and the site's key. Whoever changes one of the two files is noticed: both sides
compare a digest of what they agreed on.
"""

from __future__ import annotations

import hashlib
import json
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import tomli_w
from torch import Tensor

from fedtailor.algorithms.base import Algorithm
from fedtailor.algorithms.settings import make, settings, spec
from fedtailor.engine.options import Options
from fedtailor.errors import InvalidArgument
from fedtailor.models.several import is_several
from fedtailor.runs import files
from fedtailor.runs.signature import make_keys
from fedtailor.sites import keys
from fedtailor.sites.agreed import Agreed
from fedtailor.sites.pact import Pact, pact_of
from fedtailor.sites.table import AgreedTable
from fedtailor.sites.terms import Terms

CONFIG, SCHEMA, CHECKLIST, KEY, SITE = "config.toml", "schema.toml", "CHECKLIST.md", "key", "site.toml"
SIGNER, PEERS = "sums.pem", "peers"  # where sums are secure: what a site signs with, and how it knows the others' signatures
NAME = re.compile(r"[A-Za-z0-9][\w .-]{0,60}")
PORT = 8443
NEVER = (
    "engine",
    "address",
    "on_nodes",
    "workers",
    "worker_timeout",
    "device",
    "autocast",
    "checkpoint_every",
    "evaluate_clients",
    "shift",
    "new_clients",
    "backbone",
    "task",
)
OWN_PIECES = ("backbone", "loss", "metrics", "start")
PUBLIC = "public.csv"
MODEL = "linear"


@dataclass(frozen=True, eq=False)
class Network:
    """What config.toml and schema.toml of a folder say."""

    folder: Path

    @cached_property
    def values(self) -> dict[str, Any]:
        path = self.folder / CONFIG
        try:
            return tomllib.loads(files.read(path).decode())
        except FileNotFoundError:
            raise InvalidArgument(f"there is no {path}; give the folder that sites init made") from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise InvalidArgument(f"{path} cannot be read ({error}); correct it") from None

    def _table(self, name: str) -> dict[str, Any]:
        table = self.values.get(name)
        if not isinstance(table, Mapping):
            raise InvalidArgument(f"{self.folder / CONFIG} has no table [{name}]; restore it from a copy")
        return dict(table)

    @property
    def name(self) -> str:
        return str(self._table("network").get("name", self.folder.name))

    @property
    def clients(self) -> tuple[str, ...]:
        return tuple(map(str, self._table("network").get("sites", ())))

    @property
    def pseudonyms(self) -> bool:
        """Return whether the server writes sites' scores down under pseudonyms."""
        return self._table("network").get("pseudonyms", False) is True

    @property
    def address(self) -> tuple[str, int]:
        """The server's host and port, as sites see it."""
        host, _, port = str(self._table("network").get("address", "")).rpartition(":")
        if not host or not port.isdigit():
            raise InvalidArgument(f"{self.folder / CONFIG}: address must be host:port, as server.example.org:{PORT}")
        return host, int(port)

    @property
    def terms(self) -> Terms:
        terms = self._table("terms")
        try:
            return Terms(**terms)
        except TypeError:
            known = ", ".join(Terms.__dataclass_fields__)
            raise InvalidArgument(f"{self.folder / CONFIG}: [terms] may hold {known}, not {', '.join(terms)}") from None

    @cached_property
    def table(self) -> AgreedTable:
        return AgreedTable.read(self.folder / SCHEMA)

    @cached_property
    def agreed(self) -> Agreed:
        """Return what server and sites make the same run of."""
        asked = self._table("run")
        method, set_, model = asked.pop("method", "fedclup"), asked.pop("set", {}), asked.pop("model", MODEL)
        if ":" in str(method):
            method = str(self.folder / str(method))  # a file of one's own is beside the config
        for name in NEVER:
            if name in asked:
                raise InvalidArgument(f"{self.folder / CONFIG}: {name} has no meaning across sites; take it out")
        options, algorithm = Options.of(asked, f"{self.folder / CONFIG}: "), make(str(method), set_)
        pact = pact_of(asdict(self.terms), options, len(self.clients), algorithm.exchanges) if self.terms.secure else None
        rows = replace(self.table.rows(), public=self.public)
        return Agreed(algorithm, str(model), options, self.clients, rows, pact)

    @cached_property
    def public(self) -> Tensor | None:
        """The rows that everybody may see, for methods that distil; None: there are none."""
        path = self.folder / PUBLIC
        return self.table.public(path) if path.exists() else None

    @property
    def digest(self) -> str:
        """A checksum of all that must be the same everywhere."""
        run = self._table("run")
        content: dict[str, Any] = {
            "clients": sorted(self.clients),
            "run": run,
            "schema": tomllib.loads((self.folder / SCHEMA).read_text()),
        }
        if self.terms.secure:  # a site keeps to its own copy of these, whatever the server says
            content["secure"] = [self.terms.threshold, self.terms.bits, self.terms.largest]
        method = str(run.get("method", ""))
        own = (self.folder / method.split(":")[0]).read_text() if ":" in method else ""
        if self.pseudonyms:
            content["pseudonyms"] = True
        if (self.folder / PUBLIC).exists():
            content["public"] = (self.folder / PUBLIC).read_text()
        return hashlib.sha256(json.dumps([content, own], sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True, eq=False)
class Place(Network):
    """The folder of one site."""

    @cached_property
    def client(self) -> str:
        """The name of the site."""
        try:
            return str(tomllib.loads(files.read(self.folder / SITE).decode())["site"])
        except (FileNotFoundError, KeyError, tomllib.TOMLDecodeError):
            raise InvalidArgument(f"{self.folder} is not the folder of a site; give NETWORK/sites/SITE") from None


@dataclass(frozen=True, kw_only=True, eq=False)
class Draft:
    """What a network is to be, before anything of it is written.

    With ``secure`` (its terms: threshold, bits, largest) the server is to see sums of uploads only. ``public`` is a .csv file of
    rows that everybody may see, for methods that distil.
    """

    sites: Sequence[str]
    schema: Mapping[str, Any]
    address: tuple[str, int]
    algorithm: Algorithm
    model: str = MODEL
    options: Options = Options()
    secure: Mapping[str, Any] | None = None
    public: Path | None = None

    @cached_property
    def pact(self) -> Pact | None:
        """Return how sums are kept secure; None: they are not."""
        if self.secure is None:
            return None
        return pact_of(self.secure, self.options, len(self.sites), self.algorithm.exchanges)

    def check(self) -> None:
        """Refuse what could not run."""
        for site in self.sites:
            if not NAME.fullmatch(site) or site.endswith((".", " ")):
                raise InvalidArgument(f"{site!r} cannot be the name of a site; use letters, digits, spaces, - and _")
        for setting in OWN_PIECES:
            if getattr(self.options, setting):
                raise InvalidArgument(f"{setting} cannot be given to sites, which do not have its file; leave it out")
        if is_several(self.model):
            raise InvalidArgument("sites train the same network, and the model names several; give one of them")
        table = AgreedTable.of({**self.schema, "columns": tuple(map(dict, self.schema["columns"]))})
        table.check()
        rows = replace(table.rows(), public=None if self.public is None else table.public(self.public))
        Agreed(self.algorithm, self.model, self.options, tuple(self.sites), rows, self.pact).at_server()

    def texts(self, name: str) -> dict[str, str]:
        """Return the files that are the same everywhere in the network of this name."""
        terms: dict[str, Any] = {"deadline": 600.0, "least": min(2, len(self.sites))}
        options, pact = self.options, self.pact
        if pact is not None:
            terms |= {"secure": True, "threshold": pact.threshold, "bits": pact.bits, "largest": pact.largest}
            if pact.clip is not None:
                options = options.but(user_target_epsilon=None, user_noise=pact.noise)
        method, own = _method(self.algorithm)
        if self.public is not None:
            own = {**own, PUBLIC: self.public.read_text()}
        asked = {key: value for key, value in options.plain().items() if key not in NEVER and value is not None}
        config = {
            "network": {"name": name, "address": "{}:{}".format(*self.address), "sites": list(self.sites)},
            "terms": terms,
            "run": {"method": method, "model": self.model, **asked, "set": settings(self.algorithm)},
        }
        return {CONFIG: tomli_w.dumps(config), SCHEMA: tomli_w.dumps(dict(self.schema)), **own}


def create(folder: Path, draft: Draft) -> Network:
    """Write the folder of a network, checked: nothing is written of one that could not run."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InvalidArgument(f"{folder} exists and is not empty; give a new directory")
    draft.check()
    texts, server = draft.texts(folder.name), folder / "server"
    keys.make_certificates(server, folder.name, [draft.address[0]])
    for site in draft.sites:
        place = folder / "sites" / site
        pair = keys.make_pair(place / KEY)
        files.write(server / "keys" / f"{site}{keys.PUBLIC}", files.read(pair))
        files.write(place / keys.AUTHORITY, files.read(server / keys.AUTHORITY))
        for name, text in {**texts, SITE: tomli_w.dumps({"site": site})}.items():
            files.write(place / name, text)
        if draft.pact is not None:
            signer = make_keys(place / SIGNER)
            for other in draft.sites:
                files.write(folder / "sites" / other / PEERS / f"{site}.pem", files.read(signer))
    for name, text in texts.items():
        files.write(folder / name, text)
    files.write(folder / CHECKLIST, checklist(folder.name, draft.sites, draft.address))
    return Network(folder)


def _method(algorithm: Algorithm) -> tuple[str, dict[str, str]]:
    """Return (the method as config.toml writes it, the file of one that is not ours)."""
    written = spec(algorithm).split("@")[0]
    if ":" not in written:
        return written, {}
    place, _, kind = written.rpartition(":")
    path = Path(place)
    if path.suffix != ".py" or not path.is_file():
        raise InvalidArgument(f"{written} is in no file of its own that could be given to the sites; use mine.py:MyMethod")
    return f"{path.name}:{kind}", {path.name: path.read_text()}


def checklist(name: str, sites: Sequence[str], address: tuple[str, int]) -> str:
    """Return what to do, in plain words."""
    return f"""# {name}: before the first run

1. Read config.toml (what is trained) and schema.toml (what a table looks like) together; change them now or never: every site
   compares what it has with what the server has, and refuses anything else.
2. Give each site its own folder of sites/ ({", ".join(sites)}), over a channel you trust, and then delete it here: the file `key`
   is the site's identity, and nobody else should have it. ca.key is needed only to renew certificates: keep it offline.
3. Firewall: the server takes connections on port {address[1]}; sites only connect outwards, to {address[0]}:{address[1]}.
4. At the server: `fedtailor sites server {name}`. It stays; Ctrl-C ends it.
5. At each site: `fedtailor sites client sites/SITE --data TABLE.csv --dry-run` shows exactly what would leave the house. If its
   owner agrees, the same without --dry-run. It stays; Ctrl-C ends it.
6. At the server: `fedtailor sites start {name}` trains; `status`, `stop` and `report` tell and end.
7. Afterwards every site has its model and its report in its own folder (runs/), and the server the shared model.

A site runs the fedtailor that is installed there, and no code that a server sends. What it answers is in config.toml:
read it before you agree to it.
"""
