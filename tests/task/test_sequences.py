"""Labels at every position: padding counts nowhere, measures are per token, texts become federations and predictions."""

from __future__ import annotations

import io
import json
import math

import numpy as np
import pandas as pd
import pytest
import torch
from typer.testing import CliRunner

import fedtailor as ft
from fedtailor import Federation, Task, errors
from fedtailor.cli.app import app
from fedtailor.data.describe import describe
from fedtailor.data.readers.text import positions
from fedtailor.data.vocabulary import Vocabulary, cut
from fedtailor.local import gradient
from fedtailor.metrics.client import accuracy_on, measure
from fedtailor.models import LSTM
from tests.make import batches, normal, seeded

TOL = {"rtol": 0, "atol": 1e-12}
TOKENS, LENGTHS = 5, (4, 1, 3)


def task(**options) -> Task:
    return Task.from_module(seeded(lambda: LSTM(TOKENS, TOKENS, 3, (4, 3), per_position=True, **options)))


def batch(lengths=LENGTHS, width=4, seed=0):
    draw = np.random.default_rng(seed)
    x, y = (torch.from_numpy(draw.integers(0, TOKENS, (len(lengths), width))) for _ in range(2))
    past = torch.arange(width) >= torch.tensor(lengths)[:, None]
    return {"x": x, "y": y.masked_fill(past, -1)}


def risk_and_gradient(task: Task, rows):
    model = {k: v.requires_grad_() for k, v in task.init().items()}
    risk = task.risk(model, rows)
    return risk.detach(), torch.autograd.grad(risk, list(model.values()))


def by_hand(task: Task, rows) -> float:
    """Mean over the real tokens of -log softmax(logits)[label], one by one."""
    logits = task.apply(task.init(), rows["x"])
    losses = [
        math.log(sum(math.exp(v) for v in logits[i, t].tolist())) - logits[i, t, rows["y"][i, t]].item()
        for i in range(len(rows["x"]))
        for t in range(rows["x"].shape[1])
        if rows["y"][i, t] >= 0 and ("mask" not in rows or rows["mask"][i] > 0)
    ]
    return sum(losses) / len(losses)


# -- the risk ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mask", [None, (1.0, 0.0, 1.0)], ids=["all-rows", "masked"])
def test_risk_is_the_mean_over_real_tokens_of_real_rows(mask):
    sequence_task, rows = task(), batch()
    if mask is not None:
        rows["mask"] = torch.tensor(mask)
    assert sequence_task.risk(sequence_task.init(), rows).item() == pytest.approx(by_hand(sequence_task, rows), abs=1e-12)


def test_padded_positions_may_hold_anything():
    sequence_task, rows = task(), batch()
    other = {**rows, "x": torch.where(rows["y"] < 0, (rows["x"] + 2) % TOKENS, rows["x"])}
    assert not torch.equal(other["x"], rows["x"])
    (one, its), (two, theirs) = risk_and_gradient(sequence_task, rows), risk_and_gradient(sequence_task, other)
    assert torch.equal(one, two)
    assert all(torch.equal(a, b) for a, b in zip(its, theirs, strict=True))


def test_more_padded_positions_change_nothing():
    sequence_task, rows = task(), batch()
    wide = {"x": torch.cat([rows["x"], rows["x"][:, :3]], 1), "y": torch.cat([rows["y"], torch.full((3, 3), -1)], 1)}
    (one, its), (two, theirs) = risk_and_gradient(sequence_task, rows), risk_and_gradient(sequence_task, wide)
    torch.testing.assert_close(one, two, **TOL)
    for a, b in zip(its, theirs, strict=True):
        torch.testing.assert_close(a, b, **TOL)


def test_more_padded_rows_change_nothing_whatever_they_hold():
    sequence_task, rows = task(), batch()
    results = []
    for seed in (5, 6):
        more = batch((4, 2), seed=seed)
        wide = {name: torch.cat([rows[name], more[name]]) for name in ("x", "y")}
        results.append(risk_and_gradient(sequence_task, {**wide, "mask": torch.tensor([1.0, 1.0, 1.0, 0.0, 0.0])}))
    assert torch.equal(results[0][0], results[1][0])
    assert all(torch.equal(a, b) for a, b in zip(results[0][1], results[1][1], strict=True))
    plain, its = risk_and_gradient(sequence_task, rows)
    torch.testing.assert_close(results[0][0], plain, **TOL)
    for a, b in zip(results[0][1], its, strict=True):
        torch.testing.assert_close(a, b, **TOL)


def test_a_rows_loss_is_the_mean_over_its_own_tokens():
    sequence_task, rows = task(), batch()
    losses = sequence_task.example_loss(sequence_task.apply(sequence_task.init(), rows["x"]), rows["y"])
    for i in range(3):
        one_row = {name: value[i : i + 1] for name, value in rows.items()}
        assert losses[i].item() == pytest.approx(by_hand(sequence_task, one_row), abs=1e-12)
    assert sequence_task.weigh(rows).tolist() == list(LENGTHS)


def test_an_epochs_gradient_weighs_batches_by_their_tokens():
    sequence_task, rows = task(), batch((4, 4, 1, 2))
    data = batches(rows["x"], rows["y"], [[0, 1], [2, 3]])
    mean_gradient = gradient(sequence_task.risk, sequence_task.init(), data, by_rows=True)
    _, want = risk_and_gradient(sequence_task, rows)
    for a, b in zip(mean_gradient.values(), want, strict=True):
        torch.testing.assert_close(a, b, **TOL)


# -- measures ----------------------------------------------------------------------------------------------------------


def test_accuracy_per_token_by_hand():
    """Client 0: tokens right 2 of 3 (a fourth is padding); client 1: 1 of 2, its second row is no row at all."""
    y = torch.tensor([[[0, 1], [2, -1]], [[1, 2], [0, 0]]])
    guess = torch.tensor([[[0, 1], [0, 0]], [[1, 0], [0, 0]]])
    shared = torch.tensor([[[0, 0], [2, 2]], [[2, 0], [0, 0]]])
    logits, common = (torch.nn.functional.one_hot(g, 3).double() for g in (guess, shared))
    mask = torch.tensor([[True, True], [True, False]])
    measured = measure(task(), logits, common, y, mask)
    right, wrong = math.log(math.e + 2) - 1, math.log(math.e + 2)
    assert measured["rows"].tolist() == [3, 2]
    assert measured["acc_personal"].tolist() == [2 / 3, 1 / 2]
    assert measured["acc_global"].tolist() == [2 / 3, 0]
    assert measured["loss_personal"] == pytest.approx([(2 * right + wrong) / 3, (right + wrong) / 2])
    assert measured["both_correct"].tolist() == [1 / 3, 0]
    assert measured["global_only"].tolist() == [1 / 3, 0]
    assert measured["personal_only"].tolist() == [1 / 3, 1 / 2]
    assert accuracy_on(task(), logits, y[0]).tolist() == [2 / 3, 0]


def test_an_unknown_target_counts_in_the_loss_and_not_in_the_accuracy():
    from dataclasses import replace

    y = torch.tensor([[[0, 1, 2]]])
    logits = torch.nn.functional.one_hot(torch.tensor([[[0, 1, 0]]]), 3).double()
    right, wrong = math.log(math.e + 2) - 1, math.log(math.e + 2)
    measured = measure(replace(task(), unscored=0), logits, None, y, torch.ones(1, 1, dtype=torch.bool))
    assert measured["rows"].tolist() == [2]
    assert measured["acc_personal"].tolist() == [1 / 2]
    assert measured["loss_personal"] == pytest.approx([(2 * right + wrong) / 3])


def test_the_area_under_the_curve_is_over_tokens():
    y = torch.tensor([[[0, 1], [1, -1]]])
    score = torch.tensor([[[0.1, 0.7], [0.05, 9.0]]], dtype=torch.float64)
    logits = torch.stack([torch.zeros_like(score), score], -1)
    measured = measure(task(), logits, None, y, torch.ones(1, 2, dtype=torch.bool))
    assert measured["auc_personal"].tolist() == [0.5]  # of the positives 0.7 and 0.05 one is above 0.1


def federation(**options):
    parts = {split: [batch((4, 1, 3), seed=s), batch((2, 2), seed=s + 1)] for s, split in ((0, "train"), (7, "test"))}
    pairs = {split: [(part["x"], part["y"]) for part in both] for split, both in parts.items()}
    return Federation.from_arrays(**pairs, tokens=TOKENS, **options)


@pytest.mark.parametrize("engine", ["loop", "vectorized"])
def test_a_run_is_measured_over_the_clients_tokens_and_the_union(engine):
    fed = federation()
    assert fed.kind == "classification"
    assert fed.per_position
    run = ft.run(ft.FedAvg(lr=0.5, steps=3), fed, "lstm:3,4", rounds=2, engine=engine, workers=1, dtype="float64")
    right, count = [], []
    for client in range(2):
        x, y = fed.test.client(client)
        guess = run.predict(client, x).argmax(-1)
        right.append(int(((guess == y) & (y >= 0)).sum()))
        count.append(int((y >= 0).sum()))
    assert count == [8, 4]
    assert run.clients["acc_personal"].tolist() == pytest.approx([right[0] / 8, right[1] / 4])
    assert run.summary["acc_personal_weighted"] == pytest.approx(sum(right) / 12)
    assert run.summary["acc_global_test"] == pytest.approx(sum(right) / 12)  # FedAvg: everyone has the same model


# -- what cannot be ----------------------------------------------------------------------------------------------------


def refused(match, x, y, **options):
    with pytest.raises(errors.FedtailorError, match=match) as caught:
        Federation.from_arrays([(x, y)], [(x, y)], names=["anna"], **{"tokens": True, **options})
    assert "\n" not in str(caught.value)


def test_bad_sequences_are_refused_in_one_line():
    x = np.array([[0, 1, 2], [3, 4, 0]])
    refused(r"train x of client anna holds the token 4; tokens are numbers from 0 to 3 \(tokens=4\)", x, x, tokens=4)
    refused("client anna holds the token -1", np.where(x == 3, -1, x), x)
    refused("tokens are whole numbers", x + 0.5, x)
    refused("empty sequences", x[:, :0], np.array([0, 1]))
    refused(r"client anna has an empty sequence \(every label is -1", x, np.array([[1, 2, -1], [-1, -1, -1]]))
    refused("holds the label -2", x, x - 2)
    refused("holds the label -1; classes are", x, np.array([-1, 1]), task="classification")
    refused("y has 2 axes", x, x[:, :2], task="classification")
    refused("must be true, or the size", x, x, tokens=1)


def test_the_vocabulary_of_arrays_is_their_largest_token():
    fed = federation()
    assert fed.tokens == TOKENS
    x = np.array([[0, 9], [3, 4]])
    fed = Federation.from_arrays([(x, [0, 1])], [(x, [1, 0])], tokens=True)
    assert (fed.tokens, fed.labels, fed.per_position) == (10, 2, False)
    assert ft.run(ft.FedAvg(), fed, "lstm:4", rounds=1).summary["auc_personal"] is not None


def test_numbers_that_are_no_tokens_stay_what_they_were():
    x, y = normal(4, 3), np.array([[0, 1, 1]] * 4)
    fed = Federation.from_arrays([(x, y)], [(x, y)])
    assert (fed.kind, fed.tokens, fed.per_position) == ("multilabel", 0, False)


# -- texts -------------------------------------------------------------------------------------------------------------


def test_positions_and_what_follows_each():
    x, y = positions(np.arange(10, 18), 3, 3)
    assert x.tolist() == [[10, 11, 12], [13, 14, 15], [16, 0, 0]]
    assert y.tolist() == [[11, 12, 13], [14, 15, 16], [17, -1, -1]]
    assert [len(positions(np.arange(n), 3, 3)[0]) for n in (0, 1, 2, 4, 5)] == [0, 0, 1, 1, 2]
    seen = [t for row in positions(np.arange(100), 7, 7)[1].tolist() for t in row if t >= 0]
    assert seen == list(range(1, 100))  # every token but the first is a label once


def test_words_and_signs():
    assert cut("Don't stop, O Mother_Earth!", "word") == ["don't", "stop", ",", "o", "mother", "_", "earth", "!"]
    assert list(cut("aB ", "char")) == ["a", "B", " "]


def test_the_vocabulary_is_the_most_frequent_of_the_training_words():
    words = ["b", "b", "b", "a", "a", "c"]
    train, rest = " ".join(words * 7), "z z z z z z z z z a b b"  # z is frequent but never trained on
    fed = Federation.from_texts({"anna": f"{train} {rest}"}, level="word", length=4, vocabulary=2, test_share=0.2, val_share=0.1)
    assert fed.classes == ("<unk>", "b", "a")
    assert (fed.tokens, fed.outputs) == (3, 3)
    x, y = fed.train.client(0)
    assert x[0].tolist() == [1, 1, 1, 2]
    assert y[0].tolist() == [1, 1, 2, 2]
    assert fed.test.client(0)[1].min() <= 0  # z is unknown


def test_words_that_occur_once_are_unknown_and_every_character_is_known():
    text = "one two two three three three " * 1 + "two three " * 20
    assert set(Federation.from_texts({"a": text}, level="word", length=3).classes) == {"<unk>", "two", "three"}
    assert set(Federation.from_texts({"a": "q" + "abc" * 40}, length=5).classes) == {"<unk>", *"qabc"}


def test_parts_are_in_order_and_share_no_token():
    text = "".join(chr(ord("a") + i % 26) for i in range(200))
    fed = Federation.from_texts({"anna": text}, length=10, test_share=0.2, val_share=0.1)
    counts = [int((split.client(0)[1] >= 0).sum()) for split in (fed.train, fed.val, fed.test)]
    assert counts == [139, 19, 39]  # each part's tokens less its first
    assert "".join(fed.classes[i] for i in fed.test.client(0)[0][0]) == text[160:170]


def test_full_rows_with_one_label_each():
    fed = Federation.from_texts({"anna": "abcde" * 40}, length=10, stride=5, per_position=False)
    assert not fed.per_position
    x, y = fed.train.client(0)
    assert x.shape[1:] == (10,)
    assert {fed.classes[i] for i in y} == {"a"}


def test_clients_whose_targets_are_all_unknown_or_too_few_are_left_out_and_said():
    known = "ab" * 50
    texts = {"anna": known, "bert": "ab" * 35 + "z" * 30, "carl": "a"}
    fed = Federation.from_texts(texts, length=10, vocabulary=2)
    assert fed.names == ("anna",)
    assert any("2 clients are left out" in note for note in fed.notes)


@pytest.mark.parametrize(
    ("texts", "options", "match"),
    [
        ({}, {}, "there are no clients"),
        (["abc"], {}, "must be a dict"),
        ({"a": 3}, {}, "must be a dict"),
        ({"a": "abc"}, {"level": "line"}, "use one of char, word"),
        ({"a": "ab" * 50}, {"length": 0}, "length"),
        ({"a": "ab" * 50}, {"vocabulary": 0}, "vocabulary"),
        ({"a": "ab" * 50}, {"per_position": "yes"}, "true or false"),
        ({"a": "ab"}, {}, "long enough"),
    ],
    ids=["none", "list", "number", "level", "length", "vocabulary", "per-position", "short"],
)
def test_texts_that_cannot_be(texts, options, match):
    with pytest.raises(errors.FedtailorError, match=match):
        Federation.from_texts(texts, **options)


def test_a_description_counts_labels_not_padding():
    fed = Federation.from_texts({"anna": "ab" * 50, "bert": "aab" * 40}, length=7)
    about = describe(fed)
    real = [sum(int((s.client(i)[1] >= 0).sum()) for s in (fed.train, fed.val, fed.test)) for i in range(2)]
    assert [sum(counts) for counts in about["labels"]] == real


def test_a_vocabulary_without_an_unknown_refuses_strange_characters():
    vocabulary = Vocabulary("char", ("a", "b"))
    assert vocabulary.encode("abba").tolist() == [0, 1, 1, 0]
    with pytest.raises(errors.InvalidArgument, match="'c' is not in the vocabulary of 2"):
        vocabulary.encode("abc")
    assert Vocabulary.from_json(json.loads(json.dumps(vocabulary.to_json()))) == vocabulary


# -- the command line --------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path):
    root = tmp_path / "notes"
    (root / "carl").mkdir(parents=True)
    (root / "anna.txt").write_text("the cat sat on the mat . " * 30)
    (root / "bert.txt").write_text("a dog ran to a tree . " * 30)
    for name in ("1.txt", "2.txt"):
        (root / "carl" / name).write_text("the dog sat on a mat . " * 15)
    return root


def fedtailor(*words):
    return CliRunner().invoke(app, [str(word) for word in words])


@pytest.mark.parametrize("per_position", ["true", "false"])
def test_from_a_folder_of_texts_to_predictions(folder, tmp_path, per_position):
    out = tmp_path / "run"
    options = ("--with", "level=word", "--with", "length=7", "--with", f"per_position={per_position}", "--engine", "loop")
    options += ("--workers", 1) if per_position == "true" else ("--workers", 1, "--with", "stride=2")
    ran = fedtailor(
        "run", "ditto", f"text:{folder}", "--model", "lstm:8,16", "--rounds", 6, "--epochs", 8, "--lr", 3, "--out", out, *options
    )
    assert ran.exit_code == 0, ran.output
    rows = tmp_path / "rows.csv"
    rows.write_text("text\nthe cat sat on\n. the cat sat on the mat . the cat\nTHE unheard cat\n")
    result = fedtailor("predict", out, rows, "--client", "anna")
    assert result.exit_code == 0, result.output
    table = pd.read_csv(io.StringIO(result.stdout[result.stdout.index("text,") :]))
    assert table["prediction"].tolist()[:2] == ["the", "sat"]
    assert ((table["probability"] > 1 / 15) & (table["probability"] <= 1)).all()
    assert fedtailor("export", out, "--client", "anna", "--to", tmp_path / "m.safetensors").exit_code == 0


def test_rows_of_numbers_are_tokens_and_bad_ones_are_refused(folder, tmp_path):
    out, rows = tmp_path / "run", tmp_path / "rows.csv"
    ran = fedtailor("run", "fedavg", f"text:{folder}", "--model", "lstm:4", "--rounds", 1, "--with", "length=5", "--out", out)
    assert ran.exit_code == 0, ran.output
    for text, words in (
        ("a,b,c\n1,2,3\n", None),
        ("a,b,c\n1,2,300\n", "300 is not a token"),
        ("a,b,c,d,e,f\n1,2,3,4,5,6\n", "1 to 5 tokens"),
        ('text\n""\n', "empty text"),
    ):
        rows.write_text(text)
        result = fedtailor("predict", out, rows, "--client", "anna")
        if words is None:
            assert result.exit_code == 0, result.output
            assert "prediction,probability" in result.output
        else:
            assert result.exit_code == 2
            assert words in " ".join(result.output.split())


def test_a_folder_of_nothing_but_text_is_known_without_being_told(folder, tmp_path):
    for entry in (folder / "carl").iterdir():
        entry.unlink()
    (folder / "carl").rmdir()
    fed = Federation.load(str(folder), level="word", length=5)
    assert fed.names == ("anna", "bert")
    assert fed.recipe == {"data": f"text:{folder}", "level": "word", "length": 5}
    (tmp_path / "empty").mkdir()
    with pytest.raises(errors.InvalidData, match=r"there is no \.txt file"):
        Federation.load(f"text:{tmp_path / 'empty'}")
    (folder / "bad.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(errors.InvalidData, match=r"bad\.txt cannot be read as text in UTF-8"):
        Federation.load(str(folder))
