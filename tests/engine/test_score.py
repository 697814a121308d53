"""``score=``: what is tuned, ranked and tested."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.metrics import f1_score, log_loss, roc_auc_score, roc_curve

import fedtailor as ft
from fedtailor.errors import InvalidArgument
from fedtailor.task.kinds import CLASSIFICATION
from fedtailor.task.scores import named


def _federation(positive: float = 0.5, clients: int = 3, rows: int = 60) -> ft.Federation:
    rng = np.random.default_rng(0)

    def part() -> list[tuple[np.ndarray, np.ndarray]]:
        out = []
        for _ in range(clients):
            y = (np.arange(rows) < max(2, round(positive * rows))).astype(int)
            out.append((rng.normal(size=(rows, 3)) + y[:, None], y))
        return out

    return ft.Federation.from_arrays(train=part(), test=part(), val=part())


def test_the_score_asked_for_leads_and_is_the_one_of_scikit_learn():
    fed = _federation()
    run = ft.run(ft.FedAvg(steps=3), fed, rounds=3, score="auc")
    want = [
        roc_auc_score(fed.test.client(i)[1], torch.softmax(run.predict(i, fed.test.client(i)[0]), 1)[:, 1])
        for i in range(len(fed))
    ]
    assert run.summary["score"] == "auc"
    assert run.summary["auc_personal"] == pytest.approx(np.mean(want))
    assert run.summary["worst_decile"] == pytest.approx(min(want))
    assert {"val_auc_personal", "acc_personal", "val_acc_personal", "auc_global_test", "acc_global_test"} <= set(run.summary)


def test_with_one_rare_class_auc_leads_and_the_notes_say_why():
    rare, even = (ft.run(ft.FedAvg(steps=1), _federation(share), rounds=1).summary for share in (0.05, 0.4))
    assert (rare["score"], even["score"]) == ("auc", "acc")
    assert any("Judged by AUC" in note for note in rare["notes"])
    assert not any("Judged by" in note for note in even["notes"])


def test_log_loss_and_sensitivity_at_a_specificity_are_those_of_scikit_learn():
    rng = np.random.default_rng(1)
    y, margin = rng.integers(0, 2, 200), rng.normal(size=200)
    margin = margin + y
    logits, real = torch.tensor(np.stack([0 * margin, margin], 1))[None], torch.ones(1, 200, dtype=torch.bool)
    loss, sensitivity = named("log-loss", CLASSIFICATION.metrics), named("sensitivity@0.95", CLASSIFICATION.metrics)
    assert loss is not None
    assert sensitivity is not None
    assert loss.clients is not None
    assert sensitivity.clients is not None
    assert loss.clients(logits, torch.tensor(y)[None], real) == pytest.approx([log_loss(y, 1 / (1 + np.exp(-margin)))])
    false, true, _ = roc_curve(y, margin, drop_intermediate=False)
    assert sensitivity.clients(logits, torch.tensor(y)[None], real) == pytest.approx([true[false <= 0.05 + 1e-9].max()])


def test_a_score_of_one_class_says_which_and_the_classes_may_be_named_otherwise(tmp_path):
    draw = np.random.default_rng(0)
    x = draw.normal(size=200)
    frame = pd.DataFrame({"who": np.arange(200) % 2, "x": x, "y": np.where(x + draw.normal(size=200) > 0.8, "dead", "well")})
    columns = tmp_path / "columns.toml"
    columns.write_text(
        'format = 1\n[label]\nname = "y"\nclasses = ["well", "dead"]\n[columns.x]\ntype = "number"\nrange = [-3, 3]\n'
    )
    found = {}
    for name, options in (("well", {}), ("dead", {"columns": str(columns)})):
        fed = ft.Federation.from_table(frame, client="who", label="y", **options)
        run = ft.run(ft.FedAvg(lr=0.5), fed, rounds=20, score="f1")
        assert any(f"The F1 is of the class '{name}'" in note for note in run.summary["notes"])
        said = np.array(fed.classes)[run.predict_global(fed.test.x).argmax(1)]
        truth = np.array(fed.classes)[fed.test.y]
        found[name] = run.summary["f1_rows_global"]
        assert found[name] == pytest.approx(f1_score(truth, said, pos_label=name))
    assert found["well"] > found["dead"] + 0.1
    assert not any("is of the class" in note for note in ft.run(ft.FedAvg(), fed, rounds=1, score="auc").summary["notes"])


def test_a_score_that_is_unknown_or_does_not_apply_is_refused_by_name():
    with pytest.raises(InvalidArgument, match=r"no score 'acuracy'.*did you mean"):
        ft.run(ft.FedAvg(), _federation(), rounds=1, score="acuracy")
    three = ft.Federation.from_arrays(*[[(np.eye(3), np.arange(3))] * 2] * 2)
    with pytest.raises(InvalidArgument, match="of two classes and there are 3"):
        ft.run(ft.FedAvg(), three, rounds=1, score="auc")


def test_tuning_goes_by_the_score():
    fed = _federation()
    for score, best in (("log_loss", min), ("auc", max)):
        story = ft.compare([ft.FedAvg(steps=1)], fed, rounds=1, tune={"lr": [0.01, 1.0]}, score=score).tuning["FedAvg"]
        trials = {trial["settings"]["lr"]: trial["score"] for trial in story["trials"]}
        assert {trial["by"] for trial in story["trials"]} == {score}
        assert trials[story["chosen"]["lr"]] == best(trials.values())
