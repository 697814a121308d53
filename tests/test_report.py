"""The page says what the runs say, in words, numbers and settings, and needs nothing from elsewhere."""

from __future__ import annotations

import re

import pytest

import fedtailor as ft
from fedtailor.report.page import headline, page, settings_of, write


@pytest.fixture(scope="module")
def comparison():
    fed = ft.Federation.load("digits", clients=4, partition="dirichlet:0.5")
    return ft.compare([ft.Local(epochs=1), ft.Ditto(lam=0.2, epochs=2)], fed, rounds=2, batch_size=16)


def test_the_page_holds_every_method_with_its_figures_and_nothing_from_outside(comparison, tmp_path):
    text = page(comparison)
    for label, run in comparison.items():
        assert f"<td>{label}</td>" in text
        assert f"{run.summary['acc_personal']:.4f}" in text
    assert not re.search(r"(src|href)=|<script|@import|url[(]", text)
    path = write(comparison, tmp_path / "report.html")
    assert path.read_text() == text
    assert list(tmp_path.iterdir()) == [path]


def test_the_best_method_is_chosen_on_validation(comparison):
    scores = {label: run.summary["val_acc_personal"] for label, run in comparison.items()}
    assert headline(comparison)["best"] == max(scores, key=scores.get)


def test_settings_are_written_as_one_would_write_them():
    assert settings_of(ft.Ditto(lam=0.2, epochs=2)) == "Ditto(epochs=2, lam=0.2)"
    assert settings_of(ft.FedAvg(opt=ft.SGD(momentum=0.9))) == "FedAvg(opt=SGD(weight_decay=0.0, momentum=0.9))"


def test_a_step_size_given_to_the_optimizer_is_not_silently_ignored():
    with pytest.raises(ft.errors.InvalidArgument, match=r"ft\.FedAvg\(lr=0\.5\)"):
        ft.FedAvg(opt=ft.SGD(lr=0.5))
