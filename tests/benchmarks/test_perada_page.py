"""The page of PerAda says of each claim whether it held, by the numbers; pieces that are done are not done again."""

from __future__ import annotations

from benchmarks import perada, perada_page, perada_speed
from benchmarks.kept import Results


def measured(local, union, shifted, trained=10, seconds=1.0):
    keys = {"local": local, "global": union, "shifted": shifted, "shared": 0.5, "trained": trained, "sent": trained}
    return {**keys, "seconds": seconds, "phi": 0.2, "phi_mean": 0.3, "apart": 0.1, "epsilon": None, "settings": "X()"}


FOUND = {
    "PerAda": {"0": measured(0.80, 0.6, 0.5, seconds=3), "1": measured(0.82, 0.4, 0.3, seconds=3)},
    "PerAda without KD": {"0": measured(0.80, 0.45, 0.5), "1": measured(0.84, 0.45, 0.4)},
    "FedAlt, adapters": {"0": measured(0.83, 0.3, 0.46, 12)},
    "Ditto, full": {"0": measured(0.815, 0.5, 0.2, 99, 2.0)},
}


def test_claims_are_held_or_not_by_means_over_seeds():
    said = {claim: (held, how) for claim, held, how in perada_page.claims(FOUND)}
    assert said["Global-test: PerAda above PerAda without KD"] == (True, "0.5000 against 0.4500, 1 of 2 seeds")
    assert said["corrupted test: PerAda above PerAda without KD"] == (False, "0.4000 against 0.4500, 0 of 2 seeds")
    assert said["corrupted test: PerAda above FedAlt and FedSim with adapters"] == (False, "0.4000 against 0.4600")
    assert said["Local-test: PerAda within one point of the best rival"] == (False, "0.8100 against 0.8300 of FedAlt, adapters")
    assert said["Local-test: KD costs at most one point"] == (True, "0.8100 against 0.8200 without")
    assert said["PerAda's parameters sent are the fewest"] == (True, "10 against 12 at least")
    assert perada_page.claims({"PerAda": FOUND["PerAda"]}) == []  # nothing to compare with yet


def test_tables_have_a_deviation_only_where_there_are_seeds():
    text = "\n".join(perada_page.table(FOUND))
    assert "| PerAda | 2 | 0.8100 ± 0.0100 | 0.5000 ± 0.1000 |" in text
    assert "| Ditto, full | 1 | 0.8150 | 0.5000 | 0.2000 |" in text


def test_pieces_are_done_once_and_the_step_size_is_that_of_validation(tmp_path):
    results, done = Results(tmp_path), []
    for _ in range(2):
        for part, name, key, _make in perada.jobs(perada.Bench(perada.SCALES["tiny"], tmp_path, results), "cifar", 1):
            assert results.do(part, name, key, lambda key=key: done.append(key) or float(key == "0.1"))
    labels = perada.methods(perada.SCALES["tiny"], "cifar")
    tuned = ["0.01", "0.03", "0.1"] * (len(labels) - 1)  # one takes another's step size
    assert sorted(done) == sorted([*tuned, *("0" for _ in labels)])  # each once: the file is read again
    bench = perada.Bench(perada.SCALES["tiny"], tmp_path, Results(tmp_path))
    assert all(bench.lr("cifar", label) == 0.1 for label in labels)
    assert not Results(tmp_path, minutes=-1).do("cifar", "PerAda", "7", lambda: 1.0)  # the time is over


def test_a_time_is_held_by_the_median_of_the_ratios():
    times = [(1.0, 0.5, 3.0), (2.0, 1.2, 0.4), (4.0, 3.6, 3.6)]  # ratios 0.5, 0.6, 0.9 and 3, 0.2, 0.9
    found = {"net": {str(i): {"ditto": d, "perada": p, "perada_kd": k} for i, (d, p, k) in enumerate(times)}}
    assert [(held, how) for _, held, how in perada_speed.claims(found)] == [(True, "0.60"), (False, "0.90")]


def test_results_are_in_the_order_of_the_pieces_whatever_was_done_first(tmp_path):
    results = Results(tmp_path)
    for name in ("b", "old", "a"):
        results.do("x", name, "0", lambda: 1.0)
    results.sort([("x", "a"), ("x", "b"), ("x", "c"), ("y", "a")])
    assert {part: list(names) for part, names in results.all.items()} == {"x": ["a", "b"]}


def test_what_is_said_of_noise_and_of_changes_is_by_the_numbers():
    found = {"PerAda, noise 1": {"0": measured(0.6, 0.3, None)}, "Ditto, full, noise 1": {"0": measured(0.5, 0.4, None)}}
    assert [held for _, held, _ in perada_page.noised(found)] == [True, False]
    found = {name: {**by_seed, "1": measured(0.6, 0.6, None)} for name, by_seed in found.items()}
    words = "PerAda, noise 1 0.6000; Ditto, full, noise 1 0.5500; in 1 of 2 seeds"
    assert perada_page.noised(found)[0] == ("Local-test, noise 1: PerAda above Ditto", True, words)
    assert perada_page.noised({"PerAda, noise 1": found["PerAda, noise 1"]}) == []
    names = list(perada.changes(perada.SCALES["small"]))
    found = {name: {"0": measured(0.5, 0.5 - 0.01 * i, 0.1)} for i, name in enumerate(names)}
    said = {claim: held for claim, held, _ in perada_page.changed(found)}
    assert not said["More steps of distillation help"]  # each change is below the one before
    assert not said["Public images like the clients' help more than others"]
    assert said["A pretrained start is best, one by FedAvg better than one at random"]
    assert said["lam = 1 helps Global-test over lam = 0.1"]
    assert not said["lam = 10 costs Local-test"]
    assert len(said) == 6  # every claim finds its rows by their names
