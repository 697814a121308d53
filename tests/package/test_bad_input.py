"""Every bad input is refused by name: the right exception, who or what is wrong, and what to do about it."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import re
import signal
import time
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from torch import nn

import fedtailor as ft
from fedtailor import Task, errors
from fedtailor.engine.pool import WorkerPool
from tests.make import federation, pairs

FIX = re.compile(r"; \w|must be|must have|\bgive |\buse |\bneed")  # how a message says what to do
NAMES = ["ann", "bob", "cyd"]


@contextmanager
def refused(kind: type[errors.FedtailorError], *words: str):
    """The block raises ``kind``; its message holds ``words`` and a fix, in one line."""
    with pytest.raises(kind) as caught:
        yield caught
    message = str(caught.value)
    for word in words:
        assert word in message, f"{word!r} is not in {message!r}"
    assert FIX.search(message), f"no fix in {message!r}"
    assert "\n" not in message
    assert isinstance(caught.value, errors.FedtailorError)


def good() -> dict:
    return {"train": pairs([5, 6, 7]), "test": pairs([3, 3, 3]), "names": NAMES}


def make(split: str = "train", x=None, y=None, **more) -> ft.Federation:
    """Three good clients, but for bob's x or y in ``split``."""
    data = good()
    old_x, old_y = data[split][1]
    data[split][1] = (old_x if x is None else x, old_y if y is None else y)
    return ft.Federation.from_arrays(**{**data, **more})


def changed(values: np.ndarray, value: float) -> np.ndarray:
    out = np.array(values, float)
    out.flat[-1] = value
    return out


# -- arrays ------------------------------------------------------------------------------------------------------------


def test_the_untouched_arrays_are_accepted():
    assert len(make()) == 3
    assert len(make(x=np.ones((6, 3)), y=np.zeros(6, int))) == 3


@pytest.mark.parametrize("split", ["train", "test"])
def test_features_with_one_axis(split):
    rows = 6 if split == "train" else 3
    with refused(errors.InvalidData, "client bob", f"{split} x", "reshape(-1, 1)"):
        make(split, x=np.ones(rows))


def test_x_and_y_of_different_lengths():
    with refused(errors.InvalidData, "client bob", "6 rows", "(5,)"):
        make(y=np.zeros(5, int))


def test_a_single_number_for_y():
    with refused(errors.InvalidData, "client bob"):
        make(y=np.int64(1))


def test_clients_with_different_features():
    with refused(errors.InvalidData, "client bob", "(4,)", "(3,)"):
        make(x=np.ones((6, 4)))


def test_train_and_test_with_different_features():
    with refused(errors.InvalidData, "test", "(4,)", "(3,)"):
        ft.Federation.from_arrays(pairs([5, 6]), pairs([3, 3], d=4))


def test_validation_with_different_features():
    with refused(errors.InvalidData, "val", "(4,)", "(3,)"):
        ft.Federation.from_arrays(pairs([5, 6]), pairs([3, 3]), pairs([3, 3], d=4))


def test_public_rows_with_different_features():
    with refused(errors.InvalidData, "public", "(4,)", "(3,)"):
        ft.Federation.from_arrays(pairs([5, 6]), pairs([3, 3]), public=np.ones((5, 4)))


def test_public_rows_that_are_not_finite():
    with refused(errors.InvalidData, "public"):
        ft.Federation.from_arrays(pairs([5, 6]), pairs([3, 3]), public=np.full((5, 3), np.nan))


@pytest.mark.parametrize("dtype", [str, object, complex])
def test_features_that_are_not_numbers(dtype):
    with refused(errors.InvalidData, "train x of client bob"):
        make(x=np.ones((6, 3)).astype(dtype))


def test_features_that_are_complex_tensors():
    turned = [(torch.tensor(x).to(torch.complex64), y) for x, y in good()["train"]]
    with refused(errors.InvalidData, "train x of client ann"):
        ft.Federation.from_arrays(turned, turned, names=NAMES)


@pytest.mark.parametrize("y", [["cat"] * 6, np.array([0, 1, None, 0, 1, 0], object)], ids=["strings", "objects"])
def test_labels_that_are_not_numbers(y):
    with refused(errors.InvalidData, "train y of client bob", "encode"):
        make(y=y)


def test_features_of_ragged_rows():
    with refused(errors.InvalidData, "client bob"):
        make(x=[[1.0, 2.0, 3.0]] * 5 + [[1.0]])


def test_whole_numbers_on_one_client_and_floats_on_another():
    with refused(errors.InvalidData, "client bob", "client ann", "convert"):
        make(y=np.linspace(0, 1, 6))


@pytest.mark.parametrize("split", ["train", "test"])
def test_a_client_without_rows(split):
    with refused(errors.InvalidData, "client bob", split, "leave the client out"):
        make(split, x=np.ones((0, 3)), y=np.ones(0, int))


def test_no_clients_at_all():
    with refused(errors.InvalidData, "no clients", "train="):
        ft.Federation.from_arrays([], [])


def test_a_client_that_is_not_a_pair():
    data = good()
    data["train"][1] = np.ones((6, 3))
    with refused(errors.InvalidData, "client bob", "(x, y)"):
        ft.Federation.from_arrays(**data)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("split", ["train", "test"])
def test_features_that_are_not_finite(split, value):
    with refused(errors.InvalidData, f"{split} x of client bob", "not finite", "fill or drop"):
        make(split, x=changed(good()[split][1][0], value))


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_targets_that_are_not_finite(value):
    train, test = pairs([5, 6, 7], kind="regression"), pairs([3, 3, 3], kind="regression")
    train[1] = (train[1][0], changed(train[1][1], value))
    with refused(errors.InvalidData, "train y of client bob", "not finite", "fill or drop"):
        ft.Federation.from_arrays(train, test, names=NAMES)


def test_two_clients_with_one_name():
    with refused(errors.InvalidData, "'ann'", "name of its own"):
        make(names=["ann", "bob", "ann"])


@pytest.mark.parametrize(
    ("what", "value"), [("test", pairs([3, 3])), ("val", pairs([3])), ("names", ["ann", "bob"]), ("truth", [0])]
)
def test_a_list_of_another_length(what, value):
    with refused(errors.InvalidData, what, f"{len(value)} entries", "3 clients"):
        make(**{what: value})


def test_negative_labels():
    with refused(errors.InvalidData, "train y of client bob", "-1", "LabelEncoder"):
        make(y=np.array([1, -1, 1, 1, -1, 1]))


def test_fractional_labels():
    floats = [(x, y + 0.0) for x, y in good()["train"]]
    floats[1] = (floats[1][0], changed(floats[1][1], 0.5))
    with refused(errors.InvalidData, "train y of client bob", "0.5", "task='regression'"):
        ft.Federation.from_arrays(floats, [(x, y + 0.0) for x, y in good()["test"]], names=NAMES, task="classification")


def test_labels_with_two_columns():
    wide = [(x, np.stack([y, y + 1], 1)) for x, y in good()["train"]]
    with refused(errors.InvalidData, "train y", "multilabel"):
        ft.Federation.from_arrays(wide, wide, task="classification")


def test_many_labels_that_are_not_zero_or_one():
    wide = [(x, np.stack([y, y + 1], 1)) for x, y in good()["train"]]
    with refused(errors.InvalidData, "y", "0 and 1"):
        ft.Federation.from_arrays(wide, wide, task="multilabel")


def test_an_unknown_task_for_the_arrays():
    with refused(errors.InvalidArgument, "'clasification'", "classification"):
        make(task="clasification")


def test_an_unknown_data_set():
    with refused(errors.InvalidArgument, "'digit'", "did you mean 'digits'"):
        ft.Federation.load("digit")


def test_an_unknown_option_of_a_data_set():
    with refused(errors.InvalidArgument, "digits", "client"):
        ft.Federation.load("digits", client=5)


@pytest.mark.parametrize("rule", ["dirichlet", "dirichlet:0", "dirichlet:-1", "dirichlet:x", "shards"])
def test_a_partition_that_cannot_be_read(rule):
    with refused(errors.InvalidArgument, repr(rule), "dirichlet:0.3"):
        ft.Federation.load("digits", partition=rule)


@pytest.mark.parametrize("client", [3, -4, "dan"])
def test_a_client_that_is_not_there(client):
    run = ft.run(ft.Local(steps=1), make(), rounds=1, engine="loop")
    with refused(errors.InvalidArgument, "no client", str(client)):
        run.predict(client, np.ones((1, 3)))


def test_rows_to_predict_with_other_features():
    run = ft.run(ft.FedAvg(steps=1), make(), rounds=1, engine="loop")
    with refused(errors.ModelMismatch, "(4,)", "(3,)", "give x"):
        run.predict(0, np.ones((2, 4)))


def test_a_shared_model_where_there_is_none():
    run = ft.run(ft.Local(steps=1), make(), rounds=1, engine="loop")
    with refused(errors.ModelMismatch, "Local", "predict(client, x)"):
        run.predict_global(np.ones((1, 3)))


# -- hyper-parameters --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", [ft.FedCLUP, ft.Ditto, ft.FedProxPersonal, ft.PFedMe])
@pytest.mark.parametrize("lam", [-0.1, float("nan"), "much"])
def test_a_lam_that_is_not_a_number_from_zero_up(method, lam):
    with refused(errors.InvalidArgument, method.__name__, "lam", str(lam)):
        method(lam=lam)


@pytest.mark.parametrize("mu", [-1.0, float("nan"), "much"])
def test_a_mu_that_is_not_a_number_from_zero_up(mu):
    with refused(errors.InvalidArgument, "FedProx", "mu"):
        ft.FedProx(mu=mu)


@pytest.mark.parametrize("lr", [0, -0.1, float("nan"), True, None, [0.1], "0.1"])
def test_a_step_size_that_is_not_above_zero(lr):
    with refused(errors.InvalidArgument, "FedAvg", "lr", str(lr)):
        ft.FedAvg(lr=lr)


def test_a_schedule_that_goes_uphill():
    with refused(errors.InvalidArgument, "-0.1"):
        ft.run(ft.FedAvg(lr=ft.Exponential(-0.1), steps=1), make(), rounds=1)


def test_a_schedule_per_something_unknown():
    with refused(errors.InvalidArgument, "'steps'", "step"):
        ft.run(ft.FedAvg(lr=ft.Harmonic(0.1, per="steps"), steps=1), make(), rounds=1)


@pytest.mark.parametrize("server_lr", [0, -1.0, float("nan")])
def test_a_server_step_that_is_not_above_zero(server_lr):
    with refused(errors.InvalidArgument, "FedAvg", "server_lr"):
        ft.FedAvg(server_lr=server_lr)


@pytest.mark.parametrize("field", ["steps", "epochs"])
@pytest.mark.parametrize("value", [0, -1, 2.5, float("nan"), "many", True])
def test_local_work_that_is_not_a_whole_number_above_zero(field, value):
    with refused(errors.InvalidArgument, "FedAvg", field, str(value)):
        ft.FedAvg(**{field: value})


def test_steps_and_epochs_both():
    with refused(errors.InvalidArgument, "FedAvg", "steps or epochs"):
        ft.FedAvg(steps=2, epochs=2)


def test_personal_steps_and_epochs_both():
    with refused(errors.InvalidArgument, "Ditto", "personal_steps"):
        ft.run(ft.Ditto(personal_steps=2, personal_epochs=2), make(), rounds=1)


def test_a_radius_that_is_not_above_zero():
    with refused(errors.InvalidArgument, "FedAvg", "radius"):
        ft.FedAvg(radius=0.0)


def test_an_optimizer_that_is_none_of_ours():
    with refused(errors.InvalidArgument, "opt", "SGD"):
        ft.run(ft.FedAvg(opt="adam", steps=1), make(), rounds=1)


# -- arguments of run --------------------------------------------------------------------------------------------------


def run(algorithm=None, fed=None, **options) -> ft.Run:
    return ft.run(algorithm or ft.FedAvg(steps=1), fed or make(), **{"rounds": 1, "engine": "loop", **options})


def test_the_untouched_call_is_accepted():
    assert run().summary["rounds"] == 1


@pytest.mark.parametrize("rounds", [0, -3, 2.5, float("nan"), "ten", None, True])
def test_rounds_that_are_not_a_whole_number_above_zero(rounds):
    with refused(errors.InvalidArgument, "rounds", repr(rounds)):
        run(rounds=rounds)


@pytest.mark.parametrize("cohort", [0, 0.0, -0.5, 1.5, 4, float("nan"), float("inf"), "half", None])
def test_a_cohort_out_of_range(cohort):
    with refused(errors.InvalidArgument, "cohort", str(cohort)):
        run(cohort=cohort)


@pytest.mark.parametrize("batch_size", [0, -1, 2.5, "full"])
def test_a_batch_size_that_is_not_a_whole_number_above_zero(batch_size):
    with refused(errors.InvalidArgument, "batch_size", repr(batch_size)):
        run(batch_size=batch_size)


@pytest.mark.parametrize(
    ("argument", "value", "known"),
    [
        ("engine", "vectorised", "vectorized"),
        ("dtype", "float16", "float32"),
        ("dtype", torch.float64, "float64"),
        ("weights", "sizes", "size"),
        ("device", "cuda", "cpu"),
    ],
)
def test_an_unknown_choice(argument, value, known):
    with refused(errors.InvalidArgument, argument, repr(value), known):
        run(**{argument: value})


@pytest.mark.parametrize(
    ("argument", "value"), [("seed", -1), ("seed", 0.5), ("workers", 0), ("evaluate_every", -1), ("workers", 1.5)]
)
def test_a_count_out_of_range(argument, value):
    with refused(errors.InvalidArgument, argument, repr(value)):
        run(**{argument: value})


def test_an_unknown_task():
    with refused(errors.InvalidArgument, "'regresion'", "regression"):
        run(task="regresion")


@pytest.mark.parametrize(("name", "near"), [("lineer", "linear"), ("mpl", "mlp"), ("cnn22", "cnn2")])
def test_an_unknown_model_suggests_the_nearest(name, near):
    with refused(errors.InvalidArgument, repr(name), f"did you mean '{near}'"):
        run(model=name)


def test_an_unknown_model_that_is_near_nothing_lists_all():
    with refused(errors.InvalidArgument, "'transformer'", "linear", "mlp"):
        run(model="transformer")


@pytest.mark.parametrize("name", ["mlp:0", "mlp:a,b", "mlp:3,", "cnn2:a", "linear:4"])
def test_an_option_of_a_model_that_cannot_be_read(name):
    with refused(errors.InvalidArgument, name.split(":")[0]):
        run(model=name)


@pytest.mark.parametrize(("model", "word"), [(nn.Linear, "'in_features'"), (None, "NoneType"), (3, "int")])
def test_a_model_of_the_wrong_kind(model, word):
    with refused(errors.InvalidArgument, "model", word):
        run(model=model)


def test_a_class_for_an_algorithm():
    with refused(errors.InvalidArgument, "algorithm", "FedAvg", "create it first"):
        run(ft.FedAvg)


def test_a_name_for_an_algorithm():
    with refused(errors.InvalidArgument, "algorithm", "'fedavg'"):
        run("fedavg")


def test_a_list_for_a_federation():
    with refused(errors.InvalidArgument, "Federation.from_arrays", "list"):
        run(fed=pairs([3, 3]))


@pytest.mark.parametrize("share", [1, 1.0, -0.1, float("nan"), "half", True])
def test_new_clients_out_of_range(share):
    with refused(errors.InvalidArgument, "new_clients", repr(share)):
        run(new_clients=share)


def test_new_clients_that_leave_nobody_to_train():
    with refused(errors.InvalidArgument, "new_clients=0.99", "3 clients"):
        run(new_clients=0.99)


def test_theory_where_a_method_has_none():
    with refused(errors.InvalidArgument, "FedAvg", "steps", "'theory'"):
        ft.FedAvg(steps="theory")


# -- models that do not fit --------------------------------------------------------------------------------------------


def test_a_model_with_too_few_outputs():
    with refused(errors.ModelMismatch, "3 classes", "3 outputs"):
        run(fed=make(y=np.array([0, 1, 2, 2, 1, 0])), model=nn.Linear(3, 2))


def test_a_model_with_too_many_targets():
    with refused(errors.ModelMismatch, "2 numbers", "1", "last layer"):
        run(fed=federation([5, 6], kind="regression"), model=nn.Linear(3, 2))


@pytest.mark.parametrize(
    "module", [nn.Linear(4, 2), nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 2)), nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten())]
)
def test_a_model_whose_input_does_not_fit(module):
    with refused(errors.ModelMismatch, "(3,)", "input layer"):
        run(model=module)


def test_images_for_a_network_of_images_only():
    with refused(errors.ModelMismatch, "cnn2", "(3,)", "mlp"):
        run(model="cnn2")


def test_a_model_with_an_output_of_many_axes():
    class Wide(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, x):
            return self.layer(x).unsqueeze(-1)

    with refused(errors.ModelMismatch, "output", "2 outputs"):
        run(model=Wide())


def test_a_model_whose_output_is_not_a_tensor():
    with refused(errors.ModelMismatch, "output"):
        run(model=nn.LSTM(3, 2))


def test_a_module_without_parameters():
    with refused(errors.InvalidArgument, "no parameters"):
        run(model=nn.Flatten())


def test_a_task_with_the_loss_of_another_kind():
    with refused(errors.InvalidArgument, "regression", "classification"):
        run(model=Task.from_module(nn.Linear(3, 1), "mse"))


# -- divergence --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["loop", "vectorized"])
@pytest.mark.parametrize("method", [ft.FedAvg, ft.Local, ft.FedCLUP])
def test_divergence_names_the_round_and_the_client(method, engine):
    """Least squares: bob's features are large, the others' are zero, so that only bob's iterates explode."""
    data = pairs([5, 6, 7], kind="regression")
    data = [(x * (1e3 if i == 1 else 0), y) for i, (x, y) in enumerate(data)]
    fed = ft.Federation.from_arrays(data, data, names=NAMES)
    with refused(errors.Diverged, "round 0", "client bob", "smaller lr") as caught:
        ft.run(method(lr=1e9, steps=20), fed, bias=False, rounds=3, engine=engine)
    assert caught.value.round == 0
    assert caught.value.clients == ["bob"]


@pytest.mark.parametrize("engine", ["loop", "vectorized"])
def test_divergence_in_a_later_round_names_that_round(engine):
    """x = 1, y = 1 from w = 0: the error grows by 1e9 in each of two steps a round, 1e18 in round 0, above 3.4e38 in round 2."""
    one = [(np.ones((4, 1)), np.ones(4))] * 2
    fed = ft.Federation.from_arrays(one, one, names=["ann", "bob"], task="regression")
    with refused(errors.Diverged, "round 2", "client") as caught:
        ft.run(ft.Local(lr=1e9, steps=2), fed, bias=False, rounds=5, engine=engine, evaluate_every=0)
    assert caught.value.round == 2
    assert caught.value.clients
    assert all(name in ("ann", "bob") and name in str(caught.value) for name in caught.value.clients)


@pytest.mark.parametrize(
    "error",
    [
        errors.InvalidArgument("a; use b"),
        errors.InvalidData("client bob"),
        errors.ModelMismatch("m"),
        errors.Diverged(3, ["ann", "bob"], "the upload"),
        errors.WorkerDied("w"),
        errors.LawBroken("law"),
    ],
    ids=lambda e: type(e).__name__,
)
def test_errors_survive_the_way_back_from_a_worker_process(error):
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert str(again) == str(error)
    assert vars(again) == vars(error)


def test_divergence_shows_five_clients_and_counts_the_rest():
    message = str(errors.Diverged(2, [f"c{i}" for i in range(9)], "the upload"))
    assert "c0, c1, c2, c3, c4 and 4 more" in message
    assert "c5" not in message


# -- worker processes --------------------------------------------------------------------------------------------------


@contextmanager
def within(seconds: int):
    """Fail instead of hanging."""

    def late(*_: object) -> None:
        raise AssertionError(f"still waiting after {seconds} s")

    old = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, old)


def add(context, shared, client):
    return context + shared["w"] + client


def die(context, shared, client):
    if client == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return shared["w"]


def die_slowly(context, shared, client):
    if client == 0:
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.4)
    return shared["w"]


SHARED = {"w": torch.arange(3.0)}


def jobs(function, count=6):
    return ((function, c, ()) for c in range(count))


def test_a_pool_gives_results_in_order():
    pool = WorkerPool(10.0, 2)
    try:
        with within(20):
            got = list(pool.run(SHARED, jobs(add)))
        for c, value in enumerate(got):
            assert torch.equal(value, torch.arange(3.0) + 10 + c)
    finally:
        pool.close()


@pytest.mark.parametrize("function", [die, die_slowly])
def test_a_worker_that_dies_at_work_is_reported(function):
    pool = WorkerPool(None, 2)
    with within(20), refused(errors.WorkerDied, "worker", "workers=1"):
        list(pool.run(SHARED, jobs(function)))
    assert not multiprocessing.active_children()


@pytest.mark.parametrize("killed", [1, 2])
def test_a_worker_killed_between_rounds_is_reported(killed):
    pool = WorkerPool(1.0, 2)
    with within(20):
        assert len(list(pool.run(SHARED, jobs(add)))) == 6
        for worker in pool._workers[:killed]:
            os.kill(worker.process.pid, signal.SIGKILL)
            worker.process.join()
        with refused(errors.WorkerDied, "worker", "workers=1", "-9"):
            list(pool.run(SHARED, jobs(add)))
    assert not multiprocessing.active_children()


def test_a_run_whose_worker_is_killed_raises_and_leaves_no_process():
    def kill(record: dict) -> None:
        if record["round"] == 1:
            child = multiprocessing.active_children()[0]
            os.kill(child.pid, signal.SIGKILL)

    with within(30), refused(errors.WorkerDied, "worker", "workers=1"):
        ft.run(ft.FedAvg(steps=1), make(), rounds=50, engine="loop", workers=2, evaluate_every=0, callback=kill)
    assert not multiprocessing.active_children()


def test_a_bad_argument_found_in_a_worker_is_the_same_error_outside():
    """A network with dropout trained on batches without a key is refused inside the worker."""
    pool = WorkerPool(None, 2)
    with within(20), refused(errors.InvalidArgument, "client 1", "give"):
        list(pool.run(SHARED, jobs(complain)))
    assert not multiprocessing.active_children()


def complain(context, shared, client):
    if client == 1:
        raise errors.InvalidArgument("client 1 is wrong; give it more")
    return shared["w"]


def test_an_accident_in_a_worker_says_where_it_happened():
    pool = WorkerPool(None, 2)
    with within(20), pytest.raises(RuntimeError, match=r"client 1(.|\n)*ZeroDivisionError"):
        list(pool.run(SHARED, jobs(stumble)))
    assert not multiprocessing.active_children()


def stumble(context, shared, client):
    return shared["w"] * (1 / (client - 1))


def test_a_lam_that_starts_above_its_ceiling_is_refused():
    with pytest.raises(ft.errors.InvalidArgument, match="ceiling = 10 is below the first lam = 20"):
        ft.FedCLUPDynamic(lam=20.0)
