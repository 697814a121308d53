"""What a private run protects is said in the same words on the terminal and on the page, and so is what it does not."""

from __future__ import annotations

import pytest

import fedtailor as ft
from fedtailor.report.page import page
from fedtailor.report.privacy import not_counted, story
from tests.make import federation

OPEN = {"rounds": 1, "evaluate_every": 0}


def said(**more: object) -> str:
    method = ft.FedAvg(opt=more.pop("opt"))  # type: ignore[arg-type]
    run = ft.run(method, federation([20, 30]), **OPEN, **more)
    lines = [*story({"FedAvg": run.summary}), *not_counted([run.summary])]
    html = page({"FedAvg": [run.record()]})
    assert all(line in html for line in lines)
    return "\n".join(lines)


def test_the_worst_client_comes_first_and_what_is_not_counted_after():
    text = said(opt=ft.Private(noise=3.0))
    assert text.index("at most") < text.index("on average") < text.index("validation and test rows")
    assert "NOT PRIVATE" not in text


def test_the_page_promises_the_same_numbers_only_where_noise_can_be_repeated():
    for opt, repeats in ((ft.SGD(), True), (ft.Private(noise=3.0, seed=1), True), (ft.Private(noise=3.0), False)):
        html = page({"FedAvg": [ft.run(ft.FedAvg(opt=opt), federation([20, 30]), **OPEN).record()]})
        assert ("The same seed gives the same numbers" in html) is repeats
        assert ("The noise is secret" in html) is not repeats


@pytest.mark.parametrize("opt", [ft.Private(noise=3.0, seed=1), ft.Private(noise=0.0, force=True)], ids=["seeded", "silent"])
def test_what_is_not_private_is_called_so(opt):
    assert "FedAvg is NOT PRIVATE" in said(opt=opt)


def test_a_seed_for_whole_clients_is_called_not_private_too():
    assert "NOT PRIVATE for whole clients" in said(opt=ft.SGD(), user_clip=1.0, user_noise=2.0, user_seed=1)
    assert "a whole client" in said(opt=ft.SGD(), user_clip=1.0, user_noise=2.0)


def test_nothing_is_said_where_nothing_is_private():
    run = ft.run(ft.FedAvg(), federation([20, 30]), **OPEN)
    assert story({"FedAvg": run.summary}) == [] == not_counted([run.summary])
    assert ">Privacy<" not in page({"FedAvg": [run.record()]})
