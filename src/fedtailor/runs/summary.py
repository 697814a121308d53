"""Summary: what a run comes to, as plain values; the record that ``run.summary`` and ``summary.json`` hold.

The text beside a field is its documentation: docs/summary.md is written from it. A score is ``acc`` (the share of rows that are
right) or, in regression, ``mse``; a number is null where it does not apply. A method may add measures of its own.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any, TypedDict, get_type_hints

Number = float | None


class Asked(TypedDict):
    """What was run."""

    algorithm: Annotated[str, "The method."]
    source: Annotated[str, "Where the method comes from: its name, or file.py:Class or package.module:Class of one's own."]
    settings: Annotated[str, "The method as it would be written in Python, its step sizes and noise filled in."]
    dataset: Annotated[str, "The name of the data."]
    kind: Annotated[str, "classification, regression or multilabel."]
    score: Annotated[
        str, "The measure that chooses, ranks and is tested; its keys (val_, best_, new_, _global_test) are those of acc."
    ]
    model: Annotated[str, "The network, or the class of the module."]
    clients: Annotated[int, "Clients that were trained."]
    rounds: Annotated[int, "Rounds of training."]
    seed: Annotated[int, "Seed of training."]
    engine: Annotated[str, "The engine that ran it."]
    engine_reason: Annotated[str, "Why this engine."]
    device: Annotated[str, "Where it was computed: cpu, cuda:N or mps:0; the last one, where it was continued on another."]
    workers: Annotated[int, "Worker processes."]
    notes: Annotated[list[str], "What was assumed about the data and the model."]
    seconds: Annotated[float, "Time taken, that of earlier sittings included."]


class Scores(TypedDict, total=False):
    """Every client on its own test rows, mean over clients."""

    acc_personal: Annotated[Number, "Score of the personal models."]
    mse_personal: Annotated[Number, "The same in regression."]
    acc_global: Annotated[Number, "Score of the shared model with no local step; null where a method has none."]
    mse_global: Annotated[Number, "The same in regression."]
    acc_personal_weighted: Annotated[Number, "Score of the personal models, clients weighted by their test rows."]
    mse_personal_weighted: Annotated[Number, "The same in regression."]
    acc_global_weighted: Annotated[Number, "Score of the shared model, clients weighted by their test rows."]
    mse_global_weighted: Annotated[Number, "The same in regression."]
    loss_personal: Annotated[Number, "The risk that is descended on, of the personal models; of classes the log loss."]
    loss_global: Annotated[Number, "The risk that is descended on, of the shared model."]
    auc_personal: Annotated[Number, "Area under the ROC curve of the personal models, where it is defined."]
    auc_global: Annotated[Number, "The same of the shared model."]
    ap_personal: Annotated[Number, "Average precision of the personal models."]
    ap_global: Annotated[Number, "The same of the shared model."]
    f1_personal: Annotated[Number, "F1 of the second of two classes, or its mean over more of the personal models."]
    f1_global: Annotated[Number, "The same of the shared model."]
    balanced_personal: Annotated[Number, "Balanced accuracy of the personal models."]
    balanced_global: Annotated[Number, "The same of the shared model."]
    log_loss_personal: Annotated[Number, "Log loss of the personal models, mean over clients."]
    log_loss_global: Annotated[Number, "The same of the shared model."]
    sensitivity_personal: Annotated[Number, "Sensitivity at a specificity of 0.9 of the personal models."]
    sensitivity_global: Annotated[Number, "The same of the shared model."]
    brier_personal: Annotated[Number, "Brier score (lower is better) of the personal models."]
    brier_global: Annotated[Number, "The same of the shared model."]
    ece_personal: Annotated[Number, "Calibration error over ten bins of confidence (lower is better) of the personal models."]
    ece_global: Annotated[Number, "The same of the shared model."]
    mae_personal: Annotated[Number, "Mean absolute error of the personal models."]
    mae_global: Annotated[Number, "The same of the shared model."]
    rmse_personal: Annotated[Number, "Root mean squared error of the personal models."]
    rmse_global: Annotated[Number, "The same of the shared model."]
    r2_personal: Annotated[Number, "Coefficient of determination of the personal models."]
    r2_global: Annotated[Number, "The same of the shared model."]
    auc_rows_personal: Annotated[Number, "auc_personal on all clients' test rows as one set."]
    auc_rows_global: Annotated[Number, "The same of the shared model."]
    ap_rows_personal: Annotated[Number, "ap_personal on all clients' test rows as one set."]
    ap_rows_global: Annotated[Number, "The same of the shared model."]
    f1_rows_personal: Annotated[Number, "f1_personal on all clients' test rows as one set."]
    f1_rows_global: Annotated[Number, "The same of the shared model."]
    balanced_rows_personal: Annotated[Number, "balanced_personal on all clients' test rows as one set."]
    balanced_rows_global: Annotated[Number, "The same of the shared model."]
    log_loss_rows_personal: Annotated[Number, "log_loss_personal on all clients' test rows as one set."]
    log_loss_rows_global: Annotated[Number, "The same of the shared model."]
    sensitivity_rows_personal: Annotated[Number, "sensitivity_personal on all clients' test rows as one set."]
    sensitivity_rows_global: Annotated[Number, "The same of the shared model."]
    brier_rows_personal: Annotated[Number, "brier_personal on all clients' test rows as one set."]
    brier_rows_global: Annotated[Number, "The same of the shared model."]
    ece_rows_personal: Annotated[Number, "ece_personal on all clients' test rows as one set."]
    ece_rows_global: Annotated[Number, "The same of the shared model."]
    mae_rows_personal: Annotated[Number, "mae_personal on all clients' test rows as one set."]
    mae_rows_global: Annotated[Number, "The same of the shared model."]
    rmse_rows_personal: Annotated[Number, "rmse_personal on all clients' test rows as one set."]
    rmse_rows_global: Annotated[Number, "The same of the shared model."]
    r2_rows_personal: Annotated[Number, "r2_personal on all clients' test rows as one set."]
    r2_rows_global: Annotated[Number, "The same of the shared model."]
    own_measures: Annotated[
        list[str], "Measures of the user's own, by name: NAME_personal and NAME_global, as the others; left out without any."
    ]
    share_benefit: Annotated[Number, "Share of clients whose personal model is strictly better than the shared one."]
    worst_decile: Annotated[Number, "Score of the personal models, mean over the worst tenth of the clients."]
    deviation: Annotated[Number, "Standard deviation over clients of the personal models' score."]
    both_correct: Annotated[Number, "Share of test rows that both models get right."]
    global_only: Annotated[Number, "Share of test rows that only the shared model gets right."]
    personal_only: Annotated[Number, "Share of test rows that only the personal model gets right."]
    val_acc_personal: Annotated[Number, "Score of the personal models on validation rows."]
    val_mse_personal: Annotated[Number, "The same in regression."]
    val_acc_global: Annotated[Number, "Score of the shared model on validation rows."]
    val_mse_global: Annotated[Number, "The same in regression."]
    val_score: Annotated[
        Number, "The score on validation rows, clients with few of them counting less: it chooses methods and settings."
    ]
    val_loss_personal: Annotated[
        Number,
        "Loss of the personal models on validation rows; it chooses among methods within a standard error of the best score.",
    ]
    val_loss_global: Annotated[Number, "Loss of the shared model on validation rows."]
    threshold: Annotated[Number, "The probability of the second class from which on it is said, chosen on validation rows."]
    at_threshold: Annotated[
        dict[str, Any],
        "accuracy, f1, balanced_accuracy, sensitivity and specificity on all test rows there, and the class's name.",
    ]
    best_round: Annotated[int | None, "The evaluated round that is best on validation; null without validation rows."]
    best_val_acc_personal: Annotated[Number, "The personal models' score on validation in that round."]
    best_val_mse_personal: Annotated[Number, "The same in regression."]
    best_acc_personal: Annotated[Number, "The personal models' score on test rows in that round."]
    best_mse_personal: Annotated[Number, "The same in regression."]
    best_acc_global: Annotated[Number, "The shared model's score on test rows in that round."]
    best_mse_global: Annotated[Number, "The same in regression."]


class Elsewhere(TypedDict, total=False):
    """Models on rows that are not the client's own, and on clients that were not trained."""

    acc_global_test: Annotated[Number, "Score of the personal models on the union of all test rows."]
    mse_global_test: Annotated[Number, "The same in regression."]
    union_rows: Annotated[int, "Rows of the union that were used; a sample where there are many."]
    union_clients: Annotated[int, "Clients whose models were used there."]
    personal_distance: Annotated[Number, "Mean distance of personal and shared class probabilities on public rows (PerAda)."]
    acc_shifted_test: Annotated[Number, "Score on corrupted test rows, mean over the corruptions."]
    shifted: Annotated[dict[str, Any], "The scores for every corruption."]
    new_clients: Annotated[int, "Clients that were held out."]
    new_acc_personal: Annotated[Number, "Their score after one round of local work from the final model."]
    new_mse_personal: Annotated[Number, "The same in regression."]
    new_acc_global: Annotated[Number, "Their score with the final shared model."]
    new_mse_global: Annotated[Number, "The same in regression."]
    new_share_benefit: Annotated[Number, "Share of them whose own model is strictly better than the shared one."]
    new_worst_decile: Annotated[Number, "Score over the worst tenth of them."]
    new_epsilon_max: Annotated[Number, "Privacy spent by the one of them that spends most, in a private run."]
    new_epsilon: Annotated[Number, "The same, mean over them."]


class Cost(TypedDict, total=False):
    """What it took."""

    stopped: Annotated[str, "Why the run ended before its last round, where a callback or patience ended it."]
    kept_round: Annotated[int, "The round (from 0) whose models and measures these are, where a callback or patience kept one."]
    evaluated_clients: Annotated[
        int, "Clients in the sample that is measured between the rounds, where one was asked for; at the end it is all of them."
    ]
    trained_parameters: Annotated[int, "Parameters that a client trains in a round."]
    personal_parameters: Annotated[int, "Parameters that a client keeps to predict with."]
    bytes_down: Annotated[int, "Bytes sent to clients in all rounds, as serialised."]
    bytes_up: Annotated[int, "Bytes sent by clients in all rounds, as serialised; uploads that were lost are not counted."]
    epsilon_max: Annotated[Number, "Privacy spent by the client that spends most; null where the method is not private."]
    epsilon: Annotated[Number, "Privacy spent, mean over clients."]
    epsilon_composed: Annotated[
        Number,
        "What the worst client spends in all runs and trials of a comparison, and in the run that was the start, together.",
    ]
    epsilon_composed_mean: Annotated[Number, "The same, mean over clients."]
    delta: Annotated[float, "The largest delta of a client."]
    noise: Annotated[float, "Deviation of the noise, as a multiple of the clip."]
    clip: Annotated[Number, "Norm that rows' gradients are clipped to."]
    sampling: Annotated[str, "How batches were drawn: poisson or shuffle."]
    accountant: Annotated[str, "How epsilon was computed: prv or rdp."]
    noise_secret: Annotated[bool, "False where the noise follows from a seed that was given: the run is not private."]
    private: Annotated[
        bool, "Whether epsilon protects rows: false with a known seed, without noise, and where delta is one in the rows or more."
    ]
    not_counted: Annotated[list[str], "What was learnt from the rows of a private run beside what epsilon counts."]
    user_epsilon: Annotated[float, "Privacy of a whole client in what the server makes of the uploads."]
    user_epsilon_composed: Annotated[
        Number, "The same over all runs and trials of a comparison, and the run that was the start, together."
    ]
    user_delta: Annotated[float, "The delta that goes with it."]
    user_noise: Annotated[float, "Deviation of the noise on the sum of uploads, as a multiple of their clip."]
    user_clip: Annotated[float, "Norm that uploads are clipped to."]
    user_noise_secret: Annotated[
        bool, "False where draws and noise follow from a seed that was given: whole clients are not private."
    ]


class Truth(TypedDict, total=False):
    """What is known only where constants or true parameters are."""

    mu: Annotated[float, "Strong convexity of the clients' risks, where the theory's step sizes were asked for."]
    smoothness: Annotated[float, "Smoothness of the clients' risks, where the theory's step sizes were asked for."]
    aer: Annotated[float, "Average excess risk over the true parameters (MINIMAX)."]
    distance_personal: Annotated[Number, "Mean squared distance of the personal models to the clients' true parameters."]
    distance_global: Annotated[Number, "Squared distance of the shared model to the mean of the true parameters."]


class Summary(Asked, Scores, Elsewhere, Cost, Truth):
    """All of it."""


def documented() -> dict[str, dict[str, str]]:
    """Section -> field -> what it says."""
    out = {}
    for part in (Asked, Scores, Elsewhere, Cost, Truth):
        hints = get_type_hints(part, include_extras=True)
        out[(part.__doc__ or "").strip()] = {name: hint.__metadata__[0] for name, hint in hints.items()}
    return out


def page() -> str:
    """Return the documentation of all fields, as docs/summary.md holds it."""
    lines = ["# What the summary says", "", "Written by `make docs` from `fedtailor.runs.summary`; do not edit it."]
    for title, fields in documented().items():
        lines += ["", f"## {title}", "", *(f"- `{name}`: {text}" for name, text in fields.items())]
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page(), encoding="utf-8")
