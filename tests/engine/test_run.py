"""The public surface: run, Run, compare, Federation; engines and workers; what is written."""

from __future__ import annotations

import json
import multiprocessing
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import nn

import fedtailor as ft
from fedtailor import tree
from fedtailor.runs.store import Store

SUMMARY = [
    *("algorithm", "dataset", "clients", "rounds", "seed", "engine", "seconds", "acc_personal", "acc_global", "acc_global_test"),
    *("share_benefit", "worst_decile", "both_correct", "global_only", "personal_only", "bytes_down", "bytes_up"),
    *("trained_parameters", "personal_parameters", "epsilon"),
]


@pytest.fixture(scope="module")
def digits():
    return ft.Federation.load("digits", clients=6, partition="dirichlet:0.5")


def equal(a, b):
    return all(torch.equal(x, y) for x, y in zip(tree.leaves(a), tree.leaves(b), strict=True))


def test_all_is_exactly_what_is_exported():
    assert sorted(ft.__all__) == sorted(set(ft.__all__))
    for name in ft.__all__:
        assert getattr(ft, name) is not None
    assert set(dir(ft)) == {*ft.__all__, "__version__"}
    with pytest.raises(AttributeError, match="nothing"):
        ft.nothing  # noqa: B018


def test_importing_starts_no_thread_and_touches_no_network():
    code = """
import socket, sys, threading
def refuse(*a, **k): raise OSError("network")
socket.socket.connect = refuse
socket.getaddrinfo = refuse
import fedtailor as ft
assert "torch" not in sys.modules, "torch is loaded when first needed"
ft.run, ft.FedAvg
assert "scipy.stats" not in sys.modules, "it takes half a second, and a run does not need it"
ft.check_algorithm
import os
assert threading.active_count() == 1
assert len(os.listdir("/proc/self/task")) == 1 if os.path.isdir("/proc/self/task") else True
"""
    subprocess.run(
        [sys.executable, "-c", code], check=True, env={"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PATH": ""}
    )


def test_the_ten_lines_of_the_readme(digits):
    run = ft.run(
        ft.FedCLUP(lam=0.5, lr=0.1, steps=20),
        digits,
        model="linear",
        rounds=3,
        batch_size=None,
        cohort=1.0,
        seed=0,
        engine="auto",
    )
    assert set(run.shared) == {"model"}
    assert run.personal[3]["model"]["weight"].shape == (10, 64)
    assert len(run.personal) == 6
    assert len(list(run.personal)) == 6
    x, _ = digits.test.client(3)
    assert run.predict(3, x).shape == (len(x), 10)
    assert run.predict("3", x.numpy()).shape == (len(x), 10)
    assert run.predict_global(x).shape == (len(x), 10)
    assert [r["round"] for r in run.history] == [0, 1, 2]
    assert set(SUMMARY) <= set(run.summary)
    json.dumps(run.summary), json.dumps(run.history)
    assert "FedCLUP" in repr(run)
    with pytest.raises(IndexError):
        run.personal[6]


@pytest.mark.parametrize("model", ["linear", "mlp:8"])
def test_numbers_do_not_depend_on_workers_or_on_the_listing_of_clients(digits, model):
    options = {"rounds": 3, "batch_size": 16, "cohort": 0.5, "engine": "loop"}
    alone = ft.run(ft.Ditto(epochs=1), digits, model, workers=1, **options)
    for workers in (2, 3):
        assert equal(ft.run(ft.Ditto(epochs=1), digits, model, workers=workers, **options).shared, alone.shared)
    turned = ft.run(ft.Ditto(epochs=1), digits.take([5, 3, 1, 0, 2, 4]), model, workers=1, **options)
    assert equal(turned.shared, alone.shared)
    for name in digits.names:
        assert equal(turned.personal[name], alone.personal[name])


def test_a_longer_run_begins_as_a_shorter_one_and_seeds_differ(digits):
    options = {"batch_size": 16, "cohort": 0.5, "evaluate_every": 1, "engine": "vectorized"}
    short = ft.run(ft.FedAvg(epochs=1), digits, rounds=3, **options)
    long = ft.run(ft.FedAvg(epochs=1), digits, rounds=5, **options)
    kept = ("round", "acc_personal", "loss_personal", "bytes_up")
    assert [{k: r[k] for k in kept} for r in long.history[:3]] == [{k: r[k] for k in kept} for r in short.history]
    other = ft.run(ft.FedAvg(epochs=1), digits, rounds=3, seed=1, **options)
    assert not equal(other.shared, short.shared)


def test_auto_says_what_it_chose_and_falls_back_where_vmap_cannot(digits):
    assert ft.run(ft.FedAvg(epochs=1), digits, rounds=1, engine="auto").summary["engine_reason"].split(":")[0] in (
        "loop",
        "vectorized",
    )

    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(64, 10)

        def forward(self, x):
            y = self.layer(x)
            return y if float(y.detach().abs().sum()) >= 0 else 2 * y  # asks for a number: vmap refuses

    run = ft.run(ft.FedAvg(epochs=1), digits, Branches(), rounds=1, engine="auto")
    assert run.summary["engine"] == "loop"
    assert "cannot be vectorized" in run.summary["engine_reason"]


def test_any_module_and_the_three_kinds_of_task():
    draw = np.random.default_rng(0)
    x = [draw.normal(size=(20, 4)).astype(np.float32) for _ in range(3)]
    net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))
    before = tree.clone(dict(net.named_parameters()))
    labels = ft.Federation.from_arrays([(a, draw.integers(0, 2, 20)) for a in x], [(a, draw.integers(0, 2, 20)) for a in x])
    assert labels.kind == "classification"
    assert ft.run(ft.FedAvg(), labels, net, rounds=1).summary["auc_personal"] is not None
    several = ft.Federation.from_arrays(
        [(a, draw.integers(0, 2, (20, 2))) for a in x], [(a, draw.integers(0, 2, (20, 2))) for a in x]
    )
    assert several.kind == "multilabel"
    assert 0 <= ft.run(ft.FedAvg(), several, net, rounds=1).summary["acc_personal"] <= 1
    numbers = ft.Federation.from_arrays([(a, a[:, 0]) for a in x], [(a, a[:, 0]) for a in x])
    run = ft.run(ft.FedAvg(), numbers, rounds=1)
    assert "mse_personal" in run.summary
    assert "acc_personal" not in run.summary
    assert run.predict(0, x[0]).shape == (20,)
    assert equal(dict(net.named_parameters()), before)
    counts = ft.Federation.from_arrays([(a, np.arange(20)) for a in x], [(a, np.arange(20)) for a in x])
    assert "mse_personal" in ft.run(ft.FedAvg(lr=1e-3), counts, rounds=1, task="regression").summary


def test_weights_by_size_are_the_share_of_rows():
    clients = [(np.ones((n, 1)), np.full(n, float(n))) for n in (1, 3)]
    federation = ft.Federation.from_arrays(clients, clients)
    options = {"rounds": 1, "bias": False, "dtype": "float64"}
    # one step of size 1 from zero brings client i to its target n_i
    assert ft.run(ft.FedAvg(lr=1.0), federation, weights="uniform", **options).model()["weight"].item() == pytest.approx(2.0)
    assert ft.run(ft.FedAvg(lr=1.0), federation, weights="size", **options).model()["weight"].item() == pytest.approx(
        (1 * 1 + 3 * 3) / 4
    )


def test_compare_uses_the_same_everything(digits):
    found = ft.compare([ft.Local(epochs=1), ft.FedAvg(epochs=1), ft.FedAvg(epochs=2)], digits, rounds=2, batch_size=16)
    assert list(found) == ["Local", "FedAvg", "FedAvg 2"]
    assert [set(row) for row in found.table("acc_personal")] == [{"method", "acc_personal"}] * 3
    assert equal(
        found["FedAvg"].shared,
        ft.run(ft.FedAvg(epochs=1), digits, rounds=2, batch_size=16, engine=found["FedAvg"].summary["engine"]).shared,
    )


def test_the_run_directory(tmp_path, digits):
    run = ft.run(ft.FedAvg(epochs=1), digits, rounds=2, out=tmp_path / "run")
    assert json.loads((tmp_path / "run" / "summary.json").read_text()) == run.summary
    lines = [json.loads(line) for line in (tmp_path / "run" / "history.jsonl").read_text().splitlines()]
    assert len(lines) == 2 * (1 + 6)  # a line per round, and per client at each evaluation
    assert equal(tree.unpack((tmp_path / "run" / "models" / "shared.safetensors").read_bytes()), run.shared)
    assert not list(tmp_path.rglob("*.part"))


@pytest.mark.parametrize("on_disk", [False, True])
def test_the_store_keeps_rows_and_only_touched_ones(tmp_path, on_disk):
    store = Store(1_000_000, tmp_path / "state" if on_disk else None)
    one = {"model": {"weight": torch.randn(3, 4, 5), "buffer:n": torch.randn(3, 2)}}
    store.put(np.array([7, 999_999, 3]), one)
    assert equal(store.get(np.array([3, 7])), tree.map(lambda t: t[[2, 0]], one))
    assert store.born.sum() == 3
    if on_disk:
        used = sum(f.stat().st_blocks * 512 for f in (tmp_path / "state").iterdir())
        assert used < 1_000_000  # 88 MB are reserved, a few pages are used


def test_callback_sees_every_round_and_evaluation_can_wait_for_the_end(digits):
    seen = []
    ft.run(ft.FedAvg(epochs=1), digits, rounds=4, evaluate_every=0, callback=seen.append)
    assert [("acc_personal" in r) for r in seen] == [False, False, False, True]


def test_threads_are_given_back(digits):
    torch.set_num_threads(2)
    try:
        ft.run(ft.FedAvg(), digits, rounds=1)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)


def test_worker_processes_end_with_the_run_and_errors_come_home(digits):
    import multiprocessing

    class Breaks(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(64, 10)

        def forward(self, x):
            if self.training and torch.is_grad_enabled() and multiprocessing.parent_process() is not None:
                raise ValueError("no good here")
            return self.layer(x)

    with pytest.raises(RuntimeError, match="no good here"):
        ft.run(ft.FedAvg(), digits, Breaks(), rounds=1, engine="loop", workers=2)
    ft.run(ft.FedAvg(), digits, rounds=1, engine="loop", workers=2)
    assert not multiprocessing.active_children()


def test_numbers_and_names_of_clients_are_those_of_the_federation_given_also_with_clients_held_out(digits):
    run = ft.run(ft.Local(epochs=2), digits, rounds=2, batch_size=16, new_clients=0.34)
    held = [i for i, name in enumerate(digits.names) if name not in run.engine.plan.federation.names]
    assert len(held) == run.summary["new_clients"] == 2
    for i in range(6):
        x, _ = digits.test.client(i)
        assert torch.equal(run.predict(i, x), run.predict(str(i), x))
    scores = [(run.predict(i, x).argmax(1) == y).double().mean().item() for i in held for x, y in [digits.test.client(i)]]
    assert run.summary["new_acc_personal"] == pytest.approx(np.mean(scores))
    assert len(list(run.per_client())) == 4


def test_model_is_what_the_client_predicts_with_or_is_refused_and_is_a_copy(digits):
    x = digits.test.client(0)[0]
    for method in (ft.Ditto(), ft.FedAvg(), ft.FedPer(), ft.ScaffoldP(), ft.FedAvgFT()):
        run = ft.run(method, digits, "mlp:6", rounds=2, batch_size=16)
        assert torch.allclose(run.task.apply(run.model(0), x), run.predict(0, x), atol=1e-6)
    before = run.predict(0, x)
    next(iter(run.model(0).values())).zero_()
    assert torch.equal(run.predict(0, x), before)
    for method in (ft.APFL(), ft.KNNPer(weight=0.5), ft.HypCluster()):
        with pytest.raises(ft.errors.ModelMismatch, match="use predict"):
            ft.run(method, digits, "mlp:6", rounds=2).model(0)


def test_a_model_loads_back_into_its_module_with_batch_norm(digits):
    net = nn.Sequential(nn.Linear(64, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 10))
    run = ft.run(ft.Ditto(epochs=2), digits, net, rounds=2, batch_size=16)
    missing, unexpected = net.load_state_dict(run.state_dict(2), strict=False)
    assert set(missing) <= {"1.num_batches_tracked"}
    assert not unexpected
    x = digits.test.client(2)[0]
    assert torch.allclose(net.eval()(x), run.predict(2, x), atol=1e-6)


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="nobody can fork here")
def test_a_run_works_in_a_child_that_the_user_forked_off_a_process_with_threads(digits):

    def child(queue):
        queue.put(ft.run(ft.FedAvg(epochs=1), digits, rounds=1, batch_size=16, engine="vectorized").summary["acc_global"])

    torch.set_num_threads(2)
    (torch.randn(600, 600) @ torch.randn(600, 600)).sum()
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    process = context.Process(target=child, args=(queue,), daemon=True)
    process.start()
    process.join(60)
    torch.set_num_threads(1)
    assert process.exitcode == 0
    assert queue.get() == ft.run(ft.FedAvg(epochs=1), digits, rounds=1, batch_size=16, engine="vectorized").summary["acc_global"]


def test_an_out_directory_that_cannot_be_used_is_refused_before_any_work(tmp_path, digits):
    ft.run(ft.FedAvg(), digits, rounds=1, out=tmp_path / "a")
    with pytest.raises(ft.errors.InvalidArgument, match="another run"):
        ft.run(ft.FedAvg(), digits, rounds=1, out=tmp_path / "a")
    (tmp_path / "file").write_text("x")
    with pytest.raises(ft.errors.CannotWrite, match="cannot write"):
        ft.run(ft.FedAvg(), digits, rounds=1, out=tmp_path / "file" / "b")


def test_a_comparison_takes_labels_and_knows_its_columns(digits):
    found = ft.compare({"short": ft.FedAvg(epochs=1), "long": ft.FedAvg(epochs=3)}, digits, rounds=1)
    assert list(found) == ["short", "long"]
    with pytest.raises(ft.errors.InvalidArgument, match="acc_personal"):
        found.table("acc_personnal")


def test_labels_with_gaps_are_pointed_out():
    x = np.random.default_rng(0).normal(size=(6, 2))
    with pytest.warns(UserWarning, match="class 0"):
        ft.Federation.from_arrays([(x, np.array([1, 2, 1, 2, 1, 2]))], [(x, np.array([1, 2, 1, 2, 1, 2]))])
    with pytest.raises(ft.errors.InvalidData, match="strings"):
        ft.Federation.from_arrays([(x, x[:, 0])], [(x, x[:, 0])], names=[1])


def test_every_methods_docstring_is_that_of_its_file():
    assert "Li et al. 2021 (Ditto)" in ft.Ditto.__doc__
    assert "When to use" in ft.FedPer.__doc__
