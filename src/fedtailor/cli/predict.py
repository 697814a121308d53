"""``predict``: new rows by each client's own model."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedtailor.cli.base import Json, print_text, say
from fedtailor.cli.own_data import own_federation
from fedtailor.cli.results import Client, Method, Where, open_models, open_run
from fedtailor.errors import InvalidArgument, InvalidData, ModelMismatch

if TYPE_CHECKING:
    import pandas as pd

    from fedtailor.runs.models import Saved

Answer = Callable[[Any], Any]  # rows of features (or tokens) to logits


def predict(
    where: Where,
    rows: Annotated[
        Path | None,
        typer.Argument(
            metavar="ROWS",
            help="New rows: a .csv or .parquet file (of a text model: a column named text); with --held-out, the run's table.",
        ),
    ] = None,
    client: Client = None,
    method: Method = None,
    to: Annotated[Path | None, typer.Option(help="The .csv file to write (default: stdout).")] = None,
    held_out: Annotated[
        bool, typer.Option("--held-out", help="Only the rows of the run's own table that it was tested on.")
    ] = False,
    raw: Annotated[bool, typer.Option("--raw", help="Write cells that begin with = + - @ without an apostrophe.")] = False,
    as_json: Json = False,
) -> None:
    """Predict new rows with a client's own model.

    Without --client, each row is predicted by the model of the client it names; rows of clients the run has not seen are
    predicted by the shared model (of a comparison whose best method has none, by that of the best that has one; of a run that
    has none, by the model of the client whose rows are most like theirs). The column "model used" says which. With --held-out
    the rows are those of the run's table that nothing was trained or tuned on. A cell that a spreadsheet would take for a formula
    is written with an apostrophe before it.
    """
    from fedtailor.cli.escape import quoted_formulas
    from fedtailor.data.tables import read_table
    from fedtailor.runs.contents import readable

    folder, saved = open_run(where, method)
    if rows is None and not held_out:
        raise InvalidArgument("which rows? give a .csv or .parquet file, or --held-out for the test rows of the run")
    if held_out:
        table = test_rows(folder, saved, rows)
    else:
        assert rows is not None
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
        from fedtailor.runs.layout import refuse_links_between

        refuse_links_between(where, to)
        files.write(to, text)
        say(f"{len(filled)} rows in {to}")


def predicted(saved: Saved, table: pd.DataFrame, client: str | None, substitute: Callable[[], Saved | None]) -> pd.DataFrame:
    """The table with the prediction, in classification the probability of each class, and whose model it was; ``substitute``
    gives other models for clients that the run has not seen, where its method has no shared one."""
    import numpy as np
    import pandas as pd

    from fedtailor.data.words import row_number, text

    column = saved.schema.client if saved.schema is not None else None
    if not saved.clients and not saved.has_shared:
        raise InvalidArgument(f"the sites of this run have its models, and {saved.facts['algorithm']} has no shared one")
    if saved.clients and client is None and (column is None or column not in table.columns):
        raise InvalidArgument(f"whose model? give --client, one of {', '.join(saved.clients[:8])}")
    if client is not None or not saved.clients:  # a server of sites has nobody's model: all are newcomers
        parts = [(client or "anybody", np.arange(len(table)))]
    else:
        assert column is not None
        names = table[column].map(text, na_action="ignore")
        if (lacking := np.flatnonzero(names.isna() | (names.str.strip() == ""))).size:
            raise InvalidData(
                f"{row_number(int(table.index[lacking[0]]))} names no client in {column!r}; fill it in, or give --client"
            )
        codes, owners = pd.factorize(names)
        parts = [(str(name), np.flatnonzero(codes == i)) for i, name in enumerate(owners)]
    own = {name: _known_as(saved, name) for name, _ in parts}
    unknown = [name for name, known in own.items() if known is None]
    others: Saved | None = saved  # whose shared model strangers have; None: the mean of all predictions
    if unknown and client is not None and saved.clients:
        saved.of(client)  # refuses, naming the clients
    if unknown:
        listing = ", ".join(f"{name}{_looks_like(saved, name)}" for name in unknown[:5]) + (", ..." if len(unknown) > 5 else "")
        others = saved if saved.has_shared else substitute()
        method = "" if others is None or others is saved else f" of {others.facts['algorithm']}"
        model = f"the shared model{method} predicts"
        if others is None:
            near = "the model of the client whose rows are most like theirs"
            stand_in = near if "middles" in saved.facts else f"the mean of the {len(saved.clients)} clients' predictions"
            model = f"{saved.facts['algorithm']} has no shared one, so {stand_in} predicts"
        say(f"no model of {listing}; {model} their rows (with some labels, fedtailor onboard makes their own)")
    filled = []
    for name, rows in parts:
        part = table.iloc[rows]
        models, whose, used = _model_for(own[name], part, saved, others)
        answer = saved.ensemble if models is None else partial(models.predict, whose)
        filled.append(_predict_part(models or saved, answer, whose, part).assign(**{"model used": used}))
    if not filled:
        return table.assign(prediction=[])
    return pd.concat(filled).iloc[np.argsort(np.concatenate([rows for _, rows in parts]), kind="stable")]


def _model_for(
    client: str | None, part: pd.DataFrame, saved: Saved, others: Saved | None
) -> tuple[Saved | None, str | None, str]:
    """The models to predict a client's rows with, whose of them (None: the shared one), and what the table calls it. A stranger
    has the shared model of ``others`` or, where there is none, the nearest client's; no models: the mean of all predictions."""
    if client is not None:
        return saved, client, client
    if others is not None:
        return others, None, "shared" if others is saved else f"shared ({others.facts['algorithm']})"
    if saved.schema is None or (near := saved.nearest(saved.schema.encode(part, None, RowsOf(part.index)))) is None:
        return None, None, f"mean of {len(saved.clients)} clients"
    return saved, near, f"{near} (nearest client)"


def test_rows(folder: Path, saved: Saved, rows: Path | None) -> pd.DataFrame:
    """The rows of a run's table that it was tested on; ``rows`` is where the table lies now, if it was moved."""
    import numpy as np

    from fedtailor.data.tables import read_table

    if saved.schema is None or not saved.schema.client:
        raise InvalidArgument("--held-out is for runs on a table that has a file of its own; give the rows to predict instead")
    federation, _, path = own_federation(folder, saved, rows)
    assert federation.test.rows is not None
    return read_table(path, (saved.schema.client, saved.schema.label)).iloc[np.sort(federation.test.rows)]


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

    index: Any

    def __call__(self, row: int) -> str:
        from fedtailor.data.words import row_number

        return row_number(int(self.index[row]))


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


def _predict_part(saved: Saved, answer: Answer, client: str | None, part: pd.DataFrame) -> pd.DataFrame:
    if saved.tokens:
        return _predict_tokens(saved, answer, part)
    where = RowsOf(part.index)
    x = _numbers(part, saved.facts["shape"]) if saved.schema is None else saved.schema.encode(part, client, where)
    out = answer(x)
    classes = saved.facts["classes"] or [str(i) for i in range(out.shape[-1])]
    restore = (lambda values: values) if saved.schema is None else saved.schema.restore
    import numpy as np

    columns = saved.task.kind.written(out, classes, restore)
    if (cut := saved.facts.get("threshold")) is not None:
        columns["prediction"] = np.asarray(classes, object)[(columns[f"probability {classes[1]}"] >= cut).astype(int)]
    return part.assign(**columns)


def _predict_tokens(saved: Saved, answer: Answer, part: pd.DataFrame) -> pd.DataFrame:
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
        logits = answer(np.stack([codes[i] for i in rows]))
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
