"""``sites init``: the folder of a network, from flags that are the fields of ``NetworkSettings``."""

from __future__ import annotations

import inspect
import json
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer
from pydantic import Field

from fedtailor.cli.base import Json, print_text, say
from fedtailor.cli.flags import option_of
from fedtailor.config import RunSettings, assignments, join, read
from fedtailor.engine.checked import Checked
from fedtailor.errors import InvalidArgument

if TYPE_CHECKING:
    from fedtailor.sites.project import Draft

ROUNDS = 20


class NetworkSettings(Checked):
    """What a network is made of."""

    SWITCHES: ClassVar[tuple[str, ...]] = ("secure",)

    sites: str = Field(description="The sites' names, separated by commas.")
    schema_: Path | None = Field(
        None, alias="schema", description="What a table looks like (TOML): columns, ranges, categories, label."
    )
    like: Path | None = Field(None, description="In place of --schema: a table to take it from, to be looked over.")
    label: str | None = Field(None, description="With --like: the column to predict.")
    client: str | None = Field(None, description="With --like: the column that says whose row it is.")
    method: str | None = Field(None, description="The method, by name or as mine.py:MyMethod (default: fedclup).")
    model: str | None = Field(None, description="A network by name (see: fedtailor list models; default: linear).")
    rounds: int | None = Field(None, description=f"Rounds of training (default: {ROUNDS}).")
    set_: dict[str, Any] = Field(default_factory=dict, alias="set", description="Settings of the method.")
    config: Path | None = Field(None, description="Further settings, in a TOML file with the names of run's flags.")
    address: str = Field("127.0.0.1:8443", description="The server's host:port, as sites see it.")
    public: Path | None = Field(None, description="Rows that everybody may see (.csv), for methods that distil.")
    secure: bool = Field(False, description="Let the server see sums of uploads only, never one.")
    threshold: int | None = Field(None, description="With --secure: the fewest sites in a sum (default: two thirds).")

    @property
    def names(self) -> list[str]:
        return [name.strip() for name in self.sites.split(",") if name.strip()]

    def _looks(self) -> dict[str, Any]:
        """Return the schema of a table."""
        from fedtailor.sites.table import AgreedTable, written_like

        if (self.schema_ is None) == (self.like is None):
            raise InvalidArgument("give --schema FILE, or --like TABLE with --label, to say what a table looks like")
        if self.schema_ is not None:
            AgreedTable.read(self.schema_)  # refused here if it cannot be read
            return tomllib.loads(self.schema_.read_text())
        if self.label is None:
            raise InvalidArgument("--like needs --label, the column to predict")
        return written_like(self.like or Path(), self.label, self.client)

    def _run(self) -> RunSettings:
        """Return what is trained: what no flag says is left to the file."""
        flags = {"method": self.method, "model": self.model, "rounds": self.rounds, "set": self.set_}
        asked = {name: value for name, value in flags.items() if value is not None}
        return RunSettings.of(join({"rounds": ROUNDS}, read(self.config) if self.config else {}, asked, {"data": "sites"}))

    def draft(self) -> Draft:
        """Return what the network is to be."""
        from fedtailor.sites.project import Draft

        looks, run = self._looks(), self._run()
        host, _, port = self.address.rpartition(":")
        if not host or not port.isdigit():
            raise InvalidArgument(f"--address must be host:port, not {self.address!r}")
        if self.threshold is not None and not self.secure:
            raise InvalidArgument("--threshold says how many sites a secure sum needs; give --secure as well")
        return Draft(
            sites=self.names,
            schema=looks,
            address=(host, int(port)),
            algorithm=run.algorithm(),
            model=run.model,
            options=run.options(),
            secure={"threshold": self.threshold} if self.secure else None,
            public=self.public,
        )


def _write(folder: Path, as_json: bool, **flags: Any) -> None:
    from fedtailor.sites import project

    asked_flags = {name.rstrip("_"): value for name, value in flags.items() if value is not None}
    asked_flags["set"] = assignments(asked_flags.get("set", []), "--set")
    asked = NetworkSettings.of(asked_flags)
    made = project.create(folder, asked.draft())
    if as_json:
        typer.echo(json.dumps({"network": str(folder), "sites": asked.names, "digest": made.digest}, indent=2))
        return
    if asked.like is not None:
        say(f"ranges and categories are those of {asked.like}; look them over in schema.toml before anybody agrees to them")
    print_text(f"The network is in {folder}; go on with {folder / project.CHECKLIST}.")


def init(**flags: Any) -> None:
    """Write the folder of a network: what is trained, what tables look like, certificates, a key for every site, a checklist."""
    _write(**flags)


def _parameters() -> list[inspect.Parameter]:
    folder = Annotated[Path, typer.Argument(metavar="NETWORK", help="The folder to make.")]
    names = Annotated[str, typer.Option("--sites", metavar="A,B", help="The sites' names, separated by commas.")]
    secure = Annotated[bool, typer.Option("--secure", help=NetworkSettings.model_fields["secure"].description)]
    own: dict[str, Any] = {"sites": names, "secure": secure}
    kind, empty = inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.empty
    out = [inspect.Parameter("folder", kind, annotation=folder)]
    for name, field in NetworkSettings.model_fields.items():
        annotation = own.get(name) or option_of(name, f"--{name.rstrip('_')}", field)
        default = {"sites": empty, "secure": False}.get(name)
        out.append(inspect.Parameter(name, kind, annotation=annotation, default=default))
    return [*out, inspect.Parameter("as_json", kind, annotation=Json, default=False)]


init.__signature__ = inspect.Signature(_parameters())  # type: ignore[attr-defined]
init.__annotations__ = {parameter.name: parameter.annotation for parameter in _parameters()}
