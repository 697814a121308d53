"""``report``, ``predict`` and ``export``: what a finished run is good for."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedtailor.cli.base import Json, say
from fedtailor.errors import BadRun, InvalidArgument, ModelMismatch

if TYPE_CHECKING:
    import pandas as pd

    from fedtailor.runs.models import Saved

Where = Annotated[Path, typer.Argument(metavar="RUN", help="The directory of a finished run or comparison.")]
Client = Annotated[str | None, typer.Option(help="Whose model.")]
Method = Annotated[str | None, typer.Option(help="Which method of a comparison (default: the best on validation).")]


def report(
    where: Where,
    to: Annotated[Path | None, typer.Option(help="The file to write (default: report.html in the directory).")] = None,
    as_json: Json = False,
) -> None:
    """Write the report of a run or a comparison anew, from what is on disk."""
    from fedtailor.report.page import headline, write
    from fedtailor.runs.folder import read

    records = read(where)
    page = write(records, to or where / "report.html", command=f"fedtailor report {where}")
    found = {"report": str(page), "best": headline(records)["best"]}
    typer.echo(json.dumps(found, indent=2) if as_json else f"The report is in {page}.")


def predict(
    where: Where,
    rows: Annotated[
        Path, typer.Argument(metavar="ROWS", help="New rows: a .csv or .parquet file (of a text model: a column named text).")
    ],
    client: Client = None,
    method: Method = None,
    to: Annotated[Path | None, typer.Option(help="The .csv file to write (default: stdout).")] = None,
    as_json: Json = False,
) -> None:
    """Predict new rows with a client's own model.

    Without --client, each row is predicted by the model of the client it names; rows of clients the run has not seen are
    predicted by the shared model.
    """
    from fedtailor.data.tables import read_table

    saved = open_models(where, method)
    table = read_table(rows)
    filled = predicted(saved, table, client)
    if as_json:
        typer.echo(filled.to_json(orient="records", indent=2, double_precision=15))
    elif to is None:
        filled.to_csv(sys.stdout, index=False)
    else:
        from fedtailor.runs import files

        files.write(to, filled.to_csv(index=False))
        say(f"{len(filled)} rows in {to}")


def predicted(saved: Saved, table: pd.DataFrame, client: str | None) -> pd.DataFrame:
    """The table with the prediction, and in classification the probability of each class."""
    import pandas as pd

    column = saved.schema.client if saved.schema is not None else None
    if client is None and (column is None or column not in table.columns):
        raise InvalidArgument(f"whose model? give --client, one of {', '.join(saved.clients[:8])}")
    if client is not None:
        parts = [(client, table)]
    else:
        assert column is not None
        parts = [(str(name), part) for name, part in table.groupby(table[column].map(_text), sort=False)]
    strangers = [name for name, _ in parts if name not in saved.clients]
    if strangers and client is not None:
        saved.of(client)  # refuses, naming the clients
    if strangers:
        say(
            f"no model of {', '.join(strangers[:5])}{', ...' if len(strangers) > 5 else ''}; the shared model predicts their rows"
        )
    done = [_one(saved, None if name in strangers else name, part) for name, part in parts]
    return pd.concat(done).loc[table.index] if done else table.assign(prediction=[])


def _text(value: Any) -> str:
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def _one(saved: Saved, client: str | None, part: pd.DataFrame) -> pd.DataFrame:
    import numpy as np
    import torch

    if saved.tokens:
        return _next(saved, client, part)
    x = _numbers(part, saved.facts["shape"]) if saved.schema is None else saved.schema.encode(part, client)
    out = saved.predict(client, x)
    kind = saved.facts["kind"]
    if kind == "regression":
        values = out.reshape(len(part), -1).double().numpy()
        if saved.schema is not None:
            values = saved.schema.restore(values)
        names = ["prediction"] if values.shape[1] == 1 else [f"prediction {i}" for i in range(values.shape[1])]
        return part.assign(**dict(zip(names, values.T, strict=True)))
    chances = (torch.softmax(out, -1) if kind == "classification" else torch.sigmoid(out)).double().numpy()
    classes = saved.facts["classes"] or [str(i) for i in range(chances.shape[1])]
    shares = {f"probability {name}": chances[:, i] for i, name in enumerate(classes)}
    if kind == "multilabel":
        return part.assign(**shares)
    return part.assign(prediction=np.asarray(classes, object)[chances.argmax(1)], **shares)


def _next(saved: Saved, client: str | None, part: pd.DataFrame) -> pd.DataFrame:
    """What follows each row of tokens (a column ``text``, or a column of numbers per position), and how probable it is."""
    import numpy as np
    import torch

    longest = saved.facts["shape"][0]
    if "text" in part.columns:
        if saved.vocabulary is None:
            raise ModelMismatch("the run knows its tokens by number only; give a column of numbers per position, not text")
        texts = part["text"].astype(object).where(part["text"].notna(), "")
        codes = [saved.vocabulary.encode(str(text)) for text in texts]
        if any(len(code) > longest for code in codes):
            say(f"the model reads {longest} tokens; of longer texts it is given the last {longest}")
        if not all(len(code) for code in codes):
            raise ModelMismatch("there is an empty text; give every row at least one token")
        codes = [code[-longest:] for code in codes]
    else:
        codes = list(part.select_dtypes("number").to_numpy())
    names = np.asarray(saved.facts["classes"] or [str(i) for i in range(saved.facts["outputs"])], object)
    found, chance = np.empty(len(part), object), np.empty(len(part))
    sizes = np.array([len(code) for code in codes], np.int64)
    for size in np.unique(sizes):
        where = np.flatnonzero(sizes == size)
        logits = saved.predict(client, np.stack([codes[i] for i in where]))
        best = torch.softmax((logits[:, -1] if logits.dim() == 3 else logits).double(), -1).max(-1)
        found[where], chance[where] = names[best.indices.numpy()], best.values.numpy()
    return part.assign(prediction=found, probability=chance)


def _numbers(part: pd.DataFrame, shape: list[int]) -> Any:
    import numpy as np

    count = int(np.prod(shape))
    numbers = part.select_dtypes("number")
    if numbers.shape[1] != count:
        raise ModelMismatch(f"the rows have {numbers.shape[1]} columns of numbers but the model was trained on {count}")
    return numbers.to_numpy(np.float64).reshape(len(part), *shape)


def export(
    where: Where,
    client: Client = None,
    method: Method = None,
    to: Annotated[Path, typer.Option(help="The .safetensors file to write; with --all, a directory.")] = Path(
        "model.safetensors"
    ),
    every: Annotated[bool, typer.Option("--all", help="One file per client.")] = False,
    as_json: Json = False,
) -> None:
    """Write a client's model (without --client: the shared one) as safetensors, with torch's names."""
    from safetensors.torch import save

    from fedtailor.runs import files

    saved = open_models(where, method)
    told = {k: str(saved.facts[k]) for k in ("algorithm", "model", "kind", "classes", "shape", "outputs")}
    wanted = {name: to / f"{_file(name)}.safetensors" for name in saved.clients} if every else {client: to}
    for name, path in wanted.items():
        files.write(path, save(saved.weights(name), {**told, "client": str(name)}))
    written = [str(path) for path in wanted.values()]
    typer.echo(json.dumps({"written": written}, indent=2) if as_json else f"{len(written)} written: {to}")


def _file(name: str) -> str:
    from urllib.parse import quote

    return quote(name, safe=" ()[]=,@+") or "_"


def open_models(where: Path, method: str | None) -> Saved:
    """The models of a run; of a comparison, those of a method (the best on validation unless it is named)."""
    from fedtailor.errors import nearest
    from fedtailor.report.page import headline
    from fedtailor.runs import folder, models
    from fedtailor.runs.layout import RUNS, SUMMARY, check_version, read_json

    if check_version(where).get("command") != "compare":
        return models.read(where)
    summary = read_json(where / SUMMARY)
    if summary is None:
        raise BadRun(f"the comparison in {where} is not finished; go on with it: fedtailor resume {where}")
    if method is None:
        method = headline(folder.read(where))["best"]
        say(f"{method} was best on validation; its models are used")
    found = {label.lower(): place for label, place in summary["methods"].items()}
    if method.lower() not in found and method not in found.values():
        raise InvalidArgument(f"no method {method!r} there; {nearest(method, summary['methods'], 'the methods are')}")
    return models.read(where / RUNS / found.get(method.lower(), method) / f"seed-{summary['seed']}")
