"""``report``, ``predict`` and ``export``: the commands on a finished run."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedtailor.cli.base import Json, print_text, say
from fedtailor.errors import InvalidArgument, InvalidData, ModelMismatch

if TYPE_CHECKING:
    import pandas as pd

    from fedtailor.runs.models import Saved

Where = Annotated[Path, typer.Argument(metavar="RUN", help="The directory of a finished run or comparison.")]
Client = Annotated[str | None, typer.Option(help="Whose model.")]
Method = Annotated[str | None, typer.Option(help="Which method of a comparison (default: the best on validation).")]


def report(
    where: Annotated[Path, typer.Argument(metavar="RUN", help="The directory of a finished run, comparison or advice.")],
    to: Annotated[Path | None, typer.Option(help="The file to write (default: report.html in the directory).")] = None,
    as_json: Json = False,
) -> None:
    """Write the report of a run, a comparison or an advice anew, from what is on disk."""
    from fedtailor.report import advice
    from fedtailor.report.page import headline, write
    from fedtailor.runs.contents import readable
    from fedtailor.runs.folder import failures_of, read
    from fedtailor.runs.layout import HISTORY, SUMMARY

    if (where / advice.ADVICE).exists() and not any((where / name).exists() for name in (HISTORY, SUMMARY)):
        values, sweep = advice.read(where)
        page, best = advice.write(values, to or where / "report.html", sweep=sweep), values["algorithm"]
    else:
        with readable(where):
            records, failed = read(where), failures_of(where)
            best = headline(records)["best"]
            page = write(records, to or where / "report.html", command=f"fedtailor report {where}", failed=failed)
    print_text(json.dumps({"report": str(page), "best": best}, indent=2) if as_json else f"The report is in {page}.")


def predict(
    where: Where,
    rows: Annotated[
        Path, typer.Argument(metavar="ROWS", help="New rows: a .csv or .parquet file (of a text model: a column named text).")
    ],
    client: Client = None,
    method: Method = None,
    to: Annotated[Path | None, typer.Option(help="The .csv file to write (default: stdout).")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Write cells that begin with = + - @ without an apostrophe.")] = False,
    as_json: Json = False,
) -> None:
    """Predict new rows with a client's own model.

    Without --client, each row is predicted by the model of the client it names; rows of clients the run has not seen are
    predicted by the shared model (of a comparison whose best method has none, by that of the best that has one). The column
    "model used" says which. A cell that a spreadsheet would take for a formula is written with an apostrophe before it.
    """
    from fedtailor.cli.escape import quoted_formulas
    from fedtailor.data.tables import read_table
    from fedtailor.runs.contents import readable

    saved = open_models(where, method)
    table = read_table(rows, (saved.schema.client,) if saved.schema is not None else ())
    with readable(where):
        filled = predicted(saved, table, client, lambda: _substitute(where))
    if as_json:
        typer.echo(filled.to_json(orient="records", indent=2, double_precision=15))
        return
    text = (filled if raw else quoted_formulas(filled)).to_csv(index=False)
    if to is None and sys.stdout.isatty():
        print_text(text.removesuffix("\n"))
    elif to is None:
        sys.stdout.write(text)
    else:
        from fedtailor.runs import files

        files.write(to, text)
        say(f"{len(filled)} rows in {to}")


def predicted(saved: Saved, table: pd.DataFrame, client: str | None, substitute: Callable[[], Saved | None]) -> pd.DataFrame:
    """The table with the prediction, in classification the probability of each class, and whose model it was; ``substitute``
    gives other models for clients that the run has not seen, where its method has no shared one."""
    import numpy as np
    import pandas as pd

    from fedtailor.data.words import row_number, text

    column = saved.schema.client if saved.schema is not None else None
    if client is None and (column is None or column not in table.columns):
        raise InvalidArgument(f"whose model? give --client, one of {', '.join(saved.clients[:8])}")
    if client is not None:
        parts = [(client, np.arange(len(table)))]
    else:
        assert column is not None
        names = table[column].map(text, na_action="ignore")
        if (lacking := np.flatnonzero(names.isna() | (names.str.strip() == ""))).size:
            raise InvalidData(f"{row_number(int(lacking[0]))} names no client in {column!r}; fill it in, or give --client")
        codes, owners = pd.factorize(names)
        parts = [(str(name), np.flatnonzero(codes == i)) for i, name in enumerate(owners)]
    own = {name: _known_as(saved, name) for name, _ in parts}
    unknown = [name for name, known in own.items() if known is None]
    others = saved  # whose shared model strangers have
    if unknown and client is not None:
        saved.of(client)  # refuses, naming the clients
    if unknown:
        listing = ", ".join(f"{name}{_looks_like(saved, name)}" for name in unknown[:5]) + (", ..." if len(unknown) > 5 else "")
        sharer = saved if saved.has_shared else substitute()
        if sharer is None:
            raise ModelMismatch(
                f"no model of {listing}, and {saved.facts['algorithm']} has no shared one; give --client, or train FedAvg"
            )
        others = sharer
        method = "" if others is saved else f" of {others.facts['algorithm']}"
        say(f"no model of {listing}; the shared model{method} predicts their rows")
    filled = []
    for name, rows in parts:
        models, word = (saved, own[name]) if own[name] is not None else (others, "shared")
        used = word if models is saved else f"shared ({models.facts['algorithm']})"
        filled.append(_predict_part(models, own[name], table.iloc[rows], RowsOf(rows)).assign(**{"model used": used}))
    if not filled:
        return table.assign(prediction=[])
    return pd.concat(filled).iloc[np.argsort(np.concatenate([rows for _, rows in parts]), kind="stable")]


def _substitute(where: Path) -> Saved | None:
    """The models of the best method of a comparison that has a shared model; None in a run, or where none has."""
    from fedtailor.report.page import Evidence
    from fedtailor.runs import folder
    from fedtailor.runs.contents import open_contents

    contents = open_contents(where)
    if contents.config.get("command") != "compare":
        return None
    for label in Evidence(folder.records_of(contents)).order:
        models = open_models(where, label)
        if models.has_shared:
            return models
    return None


@dataclass(frozen=True)
class RowsOf:
    """Names a row in messages by its number in the file, of which a client has these rows."""

    rows: Any

    def __call__(self, row: int) -> str:
        from fedtailor.data.words import row_number

        return row_number(int(self.rows[row]))


def _known_as(saved: Saved, name: str) -> str | None:
    """The client of this name or, where the run takes look-alikes for one, the only one like it, which is said; None if there is
    none."""
    if name in saved.personal:
        return name
    alike = _alike(saved, name)
    if len(alike) != 1 or saved.schema is None or not saved.schema.merged_clients:
        return None
    say(f"{name!r} is taken for the client {alike[0]!r}")
    return alike[0]


def _looks_like(saved: Saved, name: str) -> str:
    alike = _alike(saved, name)
    return f" (which looks like the client {alike[0]})" if alike else ""


def _alike(saved: Saved, name: str) -> list[str]:
    from fedtailor.data.tables.alike import folded

    return [client for client in saved.clients if folded(client) == folded(name)]


def _predict_part(saved: Saved, client: str | None, part: pd.DataFrame, where: RowsOf) -> pd.DataFrame:
    if saved.tokens:
        return _predict_tokens(saved, client, part)
    x = _numbers(part, saved.facts["shape"]) if saved.schema is None else saved.schema.encode(part, client, where)
    out = saved.predict(client, x)
    classes = saved.facts["classes"] or [str(i) for i in range(out.shape[-1])]
    restore = (lambda values: values) if saved.schema is None else saved.schema.restore
    return part.assign(**saved.task.kind.written(out, classes, restore))


def _predict_tokens(saved: Saved, client: str | None, part: pd.DataFrame) -> pd.DataFrame:
    """The rows with what follows their tokens (a column ``text``, or a column of numbers per position), and its probability."""
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
    prediction, probability = np.empty(len(part), object), np.empty(len(part))
    sizes = np.array([len(code) for code in codes], np.int64)
    for size in np.unique(sizes):
        rows = np.flatnonzero(sizes == size)
        logits = saved.predict(client, np.stack([codes[i] for i in rows]))
        best = torch.softmax((logits[:, -1] if logits.dim() == 3 else logits).double(), -1).max(-1)
        prediction[rows], probability[rows] = names[best.indices.numpy()], best.values.numpy()
    return part.assign(prediction=prediction, probability=probability)


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
    """Write a client's model (without --client: the shared one) as safetensors, with torch's names.

    With --all, index.json in the directory says which file is whose.
    """
    from fedtailor.cli.escape import file_names
    from fedtailor.runs import files
    from fedtailor.runs.contents import readable
    from fedtailor.runs.weights import pack

    saved = open_models(where, method)
    metadata = {k: str(saved.facts[k]) for k in ("algorithm", "model", "kind", "classes", "shape", "outputs")}
    file_of = {name: f"{file}.safetensors" for name, file in file_names(saved.clients).items()} if every else {}
    path_of: dict[str | None, Path] = {name: to / file for name, file in file_of.items()} if every else {client: to}
    for name, path in path_of.items():
        with readable(where):
            weights = saved.weights(name)
        files.write(path, pack(weights, {**metadata, "client": str(name)}))
    if every:
        files.write_json(to / "index.json", file_of)
    written = [str(path) for path in path_of.values()]
    print_text(json.dumps({"written": written}, indent=2) if as_json else f"{len(written)} written: {to}")


def open_models(where: Path, method: str | None) -> Saved:
    """The models of a run; of a comparison, those of a method (the best on validation unless it is named)."""
    return open_run(where, method)[1]


def open_run(where: Path, method: str | None) -> tuple[Path, Saved]:
    """The directory of a run, or of the run of a comparison that ``open_models`` speaks of, and its models."""
    from fedtailor.errors import nearest
    from fedtailor.report.page import headline
    from fedtailor.runs import folder, models
    from fedtailor.runs.contents import note_missing_digests, open_contents, readable
    from fedtailor.runs.layout import RUNS

    contents = open_contents(where)
    note_missing_digests(contents)
    if contents.config.get("command") != "compare":
        return where, models.read_from(contents)
    with readable(where):
        summary = folder.summary_of(contents)
        if method is None:
            method = headline(folder.records_of(contents))["best"]
            say(f"{method} was best on validation; its models are used")
        for label, reason in summary.get("failed", {}).items():
            if label.lower() == method.lower():
                raise InvalidArgument(f"{label} failed ({reason}) and has no models; name another method")
        folder_of = {label.lower(): name for label, name in summary["methods"].items()}
        if method.lower() not in folder_of and method not in folder_of.values():
            raise InvalidArgument(f"no method {method!r} there; {nearest(method, summary['methods'], 'the methods are')}")
        place = folder_of.get(method.lower(), method)
        inside = contents.inside(f"{RUNS}/{place}/seed-{summary['seed']}")
        return inside.folder, models.read_from(inside)
