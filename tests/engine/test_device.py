"""A run on another device: every method, engine and kind of privacy gives the CPU's numbers there.

The device is the pretend one (``tests/pretend.py``), on which bits must be equal; ``make test-gpu`` puts a real one in its place,
where sums come in another order and numbers must be close.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import fedtailor as ft
from fedtailor import tree
from fedtailor.algorithms import METHODS
from fedtailor.algorithms.base import Algorithm
from fedtailor.engine import vectorized
from fedtailor.engine.options import Options
from fedtailor.engine.prepare import Prepared, prepare
from fedtailor.engine.rounds import play_on
from fedtailor.errors import InvalidArgument
from fedtailor.laws import ground
from fedtailor.local.gradients import Source, plain
from fedtailor.models.lstm import LSTMLayer
from fedtailor.runs.models import read
from fedtailor.runs.store import Store
from fedtailor.server.reduce import REDUCES
from fedtailor.task import Task
from fedtailor.task.device import BACKENDS, CPU, Backend, checked, find
from fedtailor.task.placed import lowered, placed
from tests import pretend
from tests.make import federation

ASKED = os.environ.get("FEDTAILOR_TEST_DEVICE", pretend.NAME)
REAL = None if ASKED == pretend.NAME else ASKED  # cuda, cuda:N, mps or auto
DEVICE = pretend.NAME if REAL is None else str(find(REAL))
pytestmark = pytest.mark.skipif(DEVICE == "cpu", reason="there is no CUDA or MPS device here")
only_pretend = pytest.mark.skipif(REAL is not None, reason="looks inside the pretend device")
ENGINES = ("loop", "vectorized")


@pytest.fixture
def backend() -> Iterator[Callable[..., None]]:
    """A function that gives the pretend device other properties."""
    before = BACKENDS[pretend.NAME]

    def change(**properties: Any) -> None:
        BACKENDS[pretend.NAME] = pretend.backend(**properties)

    yield change
    BACKENDS[pretend.NAME] = before


FEW = ground.federation().take([0, 1])  # with 3 batches, the last of one row, and with one short batch


def same(there: Any, here: Any, exact: bool = REAL is None) -> None:
    """Assert that two trees agree, to the bit where ``exact``, and that both are on the CPU."""
    pairs = list(zip(tree.items(there), tree.items(here), strict=True))
    for (path, ours), (other, theirs) in pairs:
        assert path == other
        assert ours.device.type == theirs.device.type == "cpu"
        if exact or not theirs.is_floating_point():
            assert torch.equal(ours, theirs), path
        else:
            torch.testing.assert_close(ours, theirs, rtol=1e-2 if REAL else 1e-5, atol=1e-3 if REAL else 1e-6)


def asked(algorithm: Algorithm, model: Any, engine: str, device: str, **more: Any) -> Prepared:
    options = Options(rounds=2, batch_size=5, seed=3, engine=engine, device=device, workers=1, **{"weights": "size", **more})
    return prepare(algorithm, more.pop("federation", FEW), model, options)


def end_of(algorithm: Algorithm, model: Any, engine: str, device: str, **more: Any) -> dict[str, Any]:
    """Everything a run leaves behind, as one tree: shared and server state, what clients keep and what they predict."""
    ready = asked(algorithm, model, engine, device, **more)
    state = ready.start()
    chosen, _ = ready.engine(state)
    for _ in play_on(chosen, state, 2, ready.size):
        pass
    told = list(chosen.predictions(state.sent, np.arange(1), state.store, ready.plan.federation.test))
    logits = {"own": told[0].personal} if told[0].shared is None else {"own": told[0].personal, "shared": told[0].shared}
    kept = chosen.out(state.shared), chosen.out(state.server), state.store.dump()
    last = {"personal": chosen.personal(state.sent, 1, state.store), "logits": logits}
    return {**dict(zip(("shared", "server", "store"), kept, strict=True)), **last}


LONG = {"cg_steps": 2, "kd_steps": 2, "inner_steps": 2, "personal_steps": 2, "logit_steps": 2}


def quick(algorithm: Algorithm) -> Algorithm:
    """The same method with little to do."""
    own = {f.name for f in fields(algorithm)}
    few = {name: count for name, count in LONG.items() if name in own and getattr(algorithm, name) is not None}
    return replace(algorithm, **few)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.__name__)
def test_a_method_gives_the_cpus_numbers_on_a_device_without_float64(method, engine, backend):
    backend(double=False)
    algorithm, network = quick(method.example()), ground.network()
    same(end_of(algorithm, network, engine, DEVICE), end_of(algorithm, network, engine, "cpu"))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("model", ["linear", "mlp:6"])
def test_rows_clients_and_compressed_uploads_are_protected_alike(model, engine, backend):
    backend(double=False)
    private = ft.FedAvg(steps=3, lr=0.1, opt=ft.Private(noise=1.0, seed=1))
    same(end_of(private, model, engine, DEVICE), end_of(private, model, engine, "cpu"))
    crowd = {"weights": "uniform", "user_clip": 0.5, "user_noise": 0.1, "user_seed": 2}
    small = ft.Compressed(method=ft.FedAvg(steps=2), keep=0.5, bits=8)
    for algorithm, more in ((ft.FedAvg(steps=2), crowd), (small, {})):
        same(end_of(algorithm, model, engine, DEVICE, **more), end_of(algorithm, model, engine, "cpu", **more))


def turned(x: Any, draw: Any) -> Any:
    """Rows with some of their signs turned."""
    return torch.where(draw.chance(0.5, x), -x, x + 0.1 * draw.normal(*x.shape[1:]) * draw.uniform(1))


@pytest.mark.parametrize("engine", ENGINES)
def test_weights_classes_and_augmentation_go_to_the_device(engine, backend):
    backend(double=False)
    more = {"class_weights": "balanced", "augment": turned}
    algorithm = ft.Ditto(steps=2)
    same(end_of(algorithm, "mlp:6", engine, DEVICE, **more), end_of(algorithm, "mlp:6", engine, "cpu", **more))


@pytest.mark.parametrize("reduce", sorted(REDUCES))
def test_uploads_are_reduced_on_the_device(reduce, backend):
    backend(double=False)
    draw = torch.Generator().manual_seed(0)
    uploads = {"a": torch.randn(5, 3, 2, generator=draw), "b": torch.randn(5, generator=draw)}
    weights, places, device = torch.rand(5, generator=draw).double(), torch.tensor([3, 0, 4, 1, 2]), find(DEVICE)

    def reduced(parts: Any) -> Any:
        way = REDUCES[reduce]
        state = way.add(way.start(), tree.map(lambda leaf: leaf[:3], parts), weights[:3], places[:3])
        return way.finish(way.add(state, tree.map(lambda leaf: leaf[3:], parts), weights[3:], places[3:]))

    there = reduced(tree.map(lambda leaf: leaf.to(device), uploads))
    assert all(leaf.device == device for leaf in tree.leaves(there))
    same(tree.map(lambda leaf: leaf.cpu(), there), reduced(uploads))


# -- whole runs ----------------------------------------------------------------------------------------------------------
NOT_COMPARED = ("seconds", "device", "notes", "engine_reason")


def same_run(there: ft.Run, here: ft.Run, exact: bool = REAL is None) -> None:
    same({"shared": there.shared, "server": there.server}, {"shared": here.shared, "server": here.server}, exact)
    for client in range(len(here.federation)):
        same(there.personal[client], here.personal[client], exact)
    assert there.summary["device"] == str(find(DEVICE))
    if not exact:
        return
    rounds = [[{key: value for key, value in record.items() if key != "seconds"} for record in r.history] for r in (there, here)]
    assert rounds[0] == rounds[1]
    kept = [key for key in here.summary if key not in NOT_COMPARED]
    assert {key: there.summary[key] for key in kept} == {key: here.summary[key] for key in kept}


def run(algorithm: Algorithm, model: Any, device: str, federation: ft.Federation = FEW, **more: Any) -> ft.Run:
    options = {"rounds": 2, "batch_size": 5, "seed": 3, "weights": "size", "workers": 1, **more}
    return ft.run(algorithm, federation, model, device=device, **options)


def test_a_run_with_newcomers_is_measured_written_and_read_back_on_the_cpu(tmp_path):
    settings: dict[str, Any] = {"new_clients": 0.4, "engine": "vectorized", "evaluate_every": 1}
    data = ground.federation()
    here = run(ft.Ditto(steps=2), "mlp:6", "cpu", data, **settings)
    there = run(ft.Ditto(steps=2), "mlp:6", DEVICE, data, out=tmp_path / "run", **settings)
    same_run(there, here)
    saved, x = read(tmp_path / "run"), data.test.client(0)[0]
    same({"x": saved.predict("site 0", x)}, {"x": there.predict(0, x)})
    same({"x": there.predict_global(x)}, {"x": here.predict_global(x)})
    same(there.model(0), here.model(0))
    newcomer = ft.onboard(saved, x, data.test.client(0)[1], "another")
    assert all(leaf.device.type == "cpu" for leaf in tree.leaves(newcomer.personal))


def test_a_run_goes_on_on_another_device_and_says_so(tmp_path):
    algorithm, calls = ft.Scaffold(steps=2), []

    def stop(record: Any) -> None:
        calls.append(record["round"])
        if len(calls) == 2:
            raise KeyboardInterrupt

    settings: dict[str, Any] = {"rounds": 4, "engine": "loop", "checkpoint_every": 1}
    for first, second in (("cpu", DEVICE), (DEVICE, "cpu")):
        calls.clear()
        folder = tmp_path / f"begun-{second}"
        with pytest.raises(KeyboardInterrupt):
            run(algorithm, "linear", first, out=folder, callback=stop, **settings)
        end = run(algorithm, "linear", second, out=folder, resume=True, **settings)
        same({"shared": end.shared}, {"shared": run(algorithm, "linear", "cpu", **settings).shared})
        names = [str(find(first)), str(find(second))]
        assert f"Begun on {names[0]} and continued on {names[1]}: not the bits of a run on one device." in end.summary["notes"]
        assert end.summary["device"] == names[1]


def test_a_kept_round_and_a_callback_see_the_cpu(tmp_path):
    seen = []

    def watch(now: Any) -> None:
        seen.append((now.shared, now.personal(0)))
        if now.record["round"] == 0:
            now.keep()

    ends = [run(ft.Ditto(steps=2), "linear", device, engine="loop", callbacks=[watch]) for device in ("cpu", DEVICE)]
    same_run(ends[1], ends[0])
    for there, here in zip(seen[2:], seen[:2], strict=True):
        same({"a": there[0], "b": there[1]}, {"a": here[0], "b": here[1]})


class Tied(nn.Module):
    """Frozen first layers, a weight that two layers share, a count in whole numbers, and draws from torch's generator."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.first, self.inner, self.out = nn.Linear(4, 5), nn.Linear(5, 5, bias=False), nn.Linear(5, 3)
            self.again = nn.Linear(5, 5, bias=False)
        self.again.weight = self.inner.weight
        self.first.requires_grad_(False)
        self.register_buffer("order", torch.tensor([4, 3, 2, 1, 0]))

    def forward(self, x: Any) -> Any:
        x = torch.tanh(self.first(x))[:, self.order]
        return self.out(torch.tanh(self.again(torch.tanh(self.inner(x)))))


def test_a_module_of_ones_own_keeps_what_is_shared_and_frozen():
    module = Tied()
    task = Task.from_module(module)
    there = placed(task, find(DEVICE))
    assert there.trainer is not None
    assert there.trainer.inner.weight is there.trainer.again.weight  # type: ignore[union-attr]
    assert {leaf.device for leaf in (*there.frozen.values(), *there.init().values())} == {find(DEVICE)}
    assert {leaf.device for leaf in (*task.frozen.values(), *module.parameters())} == {CPU}
    for model in (module, task):
        same_run(run(ft.FedAvg(steps=2), model, DEVICE, engine="loop"), run(ft.FedAvg(steps=2), model, "cpu", engine="loop"))


def test_frozen_first_layers_are_computed_on_the_device():
    chain = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    chain[0].requires_grad_(False)
    ends = [run(ft.FedAvg(steps=2), chain, device, engine="vectorized") for device in (DEVICE, "cpu")]
    same_run(*ends)
    assert any("computed once" in note for note in ends[0].summary["notes"])


# -- where things are ------------------------------------------------------------------------------------------------------
@only_pretend
def test_rows_and_personal_state_stay_in_memory_where_the_device_is_too_small(backend):
    algorithm = ft.Ditto(steps=2)
    here = end_of(algorithm, "mlp:6", "vectorized", "cpu")
    for memory, where in ((1 << 30, pretend.NAME), (64, "cpu")):
        backend(double=False, memory=memory)
        ready = asked(algorithm, "mlp:6", "vectorized", DEVICE)
        store = Store(3, device=ready.device)
        store.put(np.arange(2), {"model": torch.ones(2, 100, device=ready.device)})
        assert ready.plan.federation.train.x.device.type == where
        assert store._home.type == where
        assert store.get(np.array([1]))["model"].device == ready.device
        assert store.dump()["rows"]["model"].device.type == "cpu"
        assert any("copied batch by batch" in note for note in ready.notes) == (where == "cpu")
        same(end_of(algorithm, "mlp:6", "vectorized", DEVICE), here)


@only_pretend
def test_chunks_are_as_large_as_the_devices_memory_allows(backend):
    from fedtailor.engine.vectorized import LEAST, MEMORY, SHARE, chunk_bytes

    assert chunk_bytes(CPU) == MEMORY
    for memory in (1 << 40, 1 << 34, 0):
        backend(memory=memory)
        assert chunk_bytes(pretend.DEVICE) == max(LEAST, int(SHARE * memory))


@only_pretend
@pytest.mark.parametrize("private", [False, True])
@pytest.mark.parametrize("engine", ENGINES)
def test_the_device_is_asked_once_in_a_visit_and_not_in_every_step(engine, private):
    """On the loop engine after each client (is it finite?) and each round; vectorized for the chunk, the descent and the round.
    Noise is drawn on the CPU by keys, which the vectorized engine fetches once in a step. More layers ask no more often."""
    opt = {"opt": ft.Private(noise=1.0, seed=1)} if private else {}
    for steps, layers in ((2, "mlp:6"), (5, "mlp:6"), (2, "mlp:6,6,6")):
        algorithm = ft.FedAvg(steps=steps, lr=0.1, **opt)
        ready = asked(algorithm, layers, engine, DEVICE)
        state = ready.start()
        chosen, _ = ready.engine(state)
        for _ in play_on(chosen, state, 2, ready.size):
            asked_for = sum(pretend.waits.values())  # of the second round: the first finds out how long a message is
            pretend.waits.clear()
        noise = steps if private else 0
        assert asked_for == (len(FEW) + 1 if engine == "loop" else 3 + noise), (steps, layers)


@only_pretend
def test_workers_compute_gradients_on_the_cpu_beside_the_threads_of_a_device():
    """From the first backward pass on torch serves a device by threads, without which a forked process has no gradients."""
    module, how = ground.network(), {"rounds": 2, "engine": "loop", "device": "cpu"}
    alone = ft.run(ft.FedAvg(steps=1), FEW, module, workers=1, **how)
    two = ft.run(ft.FedAvg(steps=1), FEW, module, workers=2, **how)
    assert all(map(torch.equal, tree.leaves(alone.shared), tree.leaves(two.shared)))


@only_pretend
def test_the_clock_waits_for_the_device():
    pretend.waits.clear()
    run(ft.FedAvg(steps=1), "linear", DEVICE, rounds=3)
    assert pretend.waits["wait"] == 3


@only_pretend
def test_the_pretend_device_refuses_what_a_device_refuses():
    here, there = torch.ones(3), torch.ones(3, device=pretend.DEVICE)
    for mixed in (
        lambda: here + there,
        lambda: torch.stack([here.sum(), there.sum()]),
        lambda: here[torch.tensor([0], device=pretend.DEVICE)],
        lambda: here.sum().add_(there.sum()),
    ):
        with pytest.raises(pretend.Mixed):
            mixed()
    assert (here.sum() + there).device == there.device == there[torch.tensor([0])].device


# -- what is refused ---------------------------------------------------------------------------------------------------------
def known(count: int = 1, **more: Any) -> Backend:
    return replace(pretend.backend(**more), count=lambda: count)


def test_auto_is_the_first_device_that_is_there_and_has_the_precision(monkeypatch):
    for there, dtype, chosen in (
        ({"cuda": 2, "mps": 1}, torch.float64, "cuda:0"),
        ({"cuda": 0, "mps": 1}, torch.float32, "mps:0"),
        ({"cuda": 0, "mps": 1}, torch.float64, "cpu"),
        ({"cuda": 0, "mps": 0}, torch.float32, "cpu"),
    ):
        for kind, count in there.items():
            monkeypatch.setitem(BACKENDS, kind, known(count, double=kind != "mps"))
        assert str(find("auto", dtype)) == chosen
    monkeypatch.setitem(BACKENDS, "mps", known(1, double=False))
    note = "Computed on the CPU: mps has no float64."
    assert note in prepare(ft.FedAvg(), FEW, "linear", Options(device="auto", dtype="float64")).notes


def test_devices_that_are_not_there_or_lack_something_are_refused(monkeypatch):
    monkeypatch.setitem(BACKENDS, "cuda", known(2))
    monkeypatch.setitem(BACKENDS, "mps", known(1, double=False))
    for settings, words in (
        ({"device": "cuda:2"}, "there are 2 cuda devices here, numbered from 0"),
        ({"device": "mps", "dtype": "float64"}, "has no float64; use dtype='float32', or device='cpu'"),
        ({"device": "cuda", "workers": 2}, "worker processes share the CPU"),
        ({"device": "cuda", "engine": "flower"}, "engine='flower' computes on the CPU"),
        ({"autocast": "bf16"}, "autocast='bf16' gains nothing on cpu"),
        ({"device": "cuda", "autocast": "bf16", "dtype": "float64"}, "autocast lowers the precision of float32 runs"),
        ({"device": "gpu"}, "device must be cpu, cuda, cuda:N, mps or auto"),
        ({"device": "cpu:1"}, "must be cpu, cuda, cuda:N, mps or auto"),
    ):
        with pytest.raises(InvalidArgument, match=words):
            ft.run(ft.FedAvg(), FEW, "linear", rounds=1, **settings)
    monkeypatch.setitem(BACKENDS, "cuda", known(0))
    with pytest.raises(InvalidArgument, match="there is no cuda device here; use device='cpu', or auto"):
        ft.run(ft.FedAvg(), FEW, "linear", rounds=1, device="cuda")
    assert [checked(name) for name in ("cpu", "cuda", "cuda:3", "mps", "auto")] == ["cpu", "cuda", "cuda:3", "mps", "auto"]


def test_the_device_is_no_part_of_what_a_run_is_and_lower_precision_is():
    plain = Options().identity()
    assert Options(device="auto").identity() == plain
    assert "autocast" not in plain
    assert Options(autocast="bf16").identity()["autocast"] == "bf16"


@pytest.mark.parametrize("stacked", [False, True])
def test_lower_precision_is_of_the_passes_only(stacked):
    """bfloat16 has 8 bits: outputs and gradients are near those of float32, not equal to them, and float32 again."""
    task = Task.from_module(ground.network(nn.LayerNorm(6)).float())
    low, (x, y) = lowered(task, CPU), FEW.to(torch.float32).train.client(0)
    model, batch = task.init(), {"x": x, "y": y, "key": torch.tensor(1)}

    def two(leaf: Any) -> Any:
        return leaf.unsqueeze(0).expand(2, *leaf.shape).contiguous()

    def gradient(of: Task) -> Any:
        given = tree.map(two, {"model": model, "batch": batch}) if stacked else {"model": model, "batch": batch}
        return plain(Source(of.risk, of, given["model"], {}, stacked=stacked))(tree.leaves(given["model"]), given["batch"])

    full, lower = task.apply(model, x), low.apply(model, x)
    assert lower.dtype == torch.float32
    assert not torch.equal(full, lower)
    torch.testing.assert_close(lower, full, rtol=0.05, atol=0.05)
    for ours, theirs in zip(gradient(low), gradient(task), strict=True):
        assert ours.dtype == torch.float32
        torch.testing.assert_close(ours, theirs, rtol=0.1, atol=0.05)


# -- the larger cross --------------------------------------------------------------------------------------------------------
def images() -> ft.Federation:
    """Three clients with small images."""
    draw = np.random.default_rng(0)
    rows = [[(draw.normal(size=(n, 1, 8, 8)), np.arange(n) % 3) for n in (7, 5, 6)] for _ in range(3)]
    return ft.Federation.from_arrays(*rows, public=draw.normal(size=(6, 1, 8, 8)), task="classification")


def tokens() -> ft.Federation:
    """Three clients with sequences of tokens and a label for every position."""
    draw = np.random.default_rng(0)
    rows = [[(draw.integers(0, 9, (n, 6)), draw.integers(0, 9, (n, 6))) for n in (7, 5, 6)] for _ in range(2)]
    return ft.Federation.from_arrays(*rows, tokens=9, task="classification")


NETWORKS = [("cnn2", images), ("resnet8:group", images), ("vit:patch=4,dim=8,depth=1,heads=2", images), ("lstm:5", tokens)]


class ChannelsFirst(TorchDispatchMode):
    """Torch copies what the derivative of a group norm reads to channels first, except on the CPU: here the CPU does too."""

    met = 0  # derivatives whose kernel was handed another layout

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.native_group_norm_backward.default and args[0].device == CPU:
            self.met += not args[1].is_contiguous()
            args = (args[0].contiguous(), args[1].contiguous(), *args[2:])
        return func(*args, **(kwargs or {}))


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("model", "data"), NETWORKS, ids=lambda value: value if isinstance(value, str) else "")
def test_a_family_of_networks_gives_the_cpus_numbers(model, data, engine, monkeypatch):
    """Bits, where the CPU takes the two ways that torch and we take elsewhere; by themselves they differ in the last digits.

    They are the layout that the derivative of a group norm reads, and an LSTM layer as our cell, not torch's fused kernel.
    """
    for algorithm in (ft.Ditto(steps=2), ft.FedAvg(steps=2, lr=0.1, opt=ft.Private(noise=1.0, seed=1))):
        there = run(algorithm, model, DEVICE, data(), engine=engine)
        if REAL is None and engine == "loop" and model.startswith(("resnet", "lstm")):
            same_run(there, run(algorithm, model, "cpu", data(), engine=engine), exact=False)
        monkeypatch.setattr(sys.modules[LSTMLayer.__module__], "FUSED", ())
        with ChannelsFirst() as mode:
            here = run(algorithm, model, "cpu", data(), engine=engine)
        monkeypatch.undo()
        if model.startswith("resnet") and engine == "loop":
            assert mode.met
        same_run(there, here)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.__name__)
def test_a_whole_run_of_a_method_is_that_of_the_cpu(method, engine):
    if REAL is not None and not BACKENDS[find(DEVICE).type].double:
        pytest.skip("the device has no float64")
    ends = [
        run(method.example(), ground.network(), device, ground.federation(), engine=engine, dtype="float64")
        for device in (DEVICE, "cpu")
    ]
    same_run(*ends)


@only_pretend
@pytest.mark.parametrize("word", [torch.OutOfMemoryError, RuntimeError], ids=["torch", "words"])
def test_a_device_without_memory_for_a_chunk_computes_it_in_halves(word, monkeypatch):
    """Before: the run ended with torch's error. The first layers of more than ``most`` clients do not fit."""
    data, method, calls, most = federation((9,) * 8), ft.Ditto(steps=2), [], 3
    compute = pretend._compute

    def tight(func, args, kwargs):
        out = compute(func, args, kwargs)
        new = not func._schema.is_mutable  # what is written in place takes no memory
        if new and any(t.shape[1:] == (64, 3) and len(t) > most for t in pretend._tensors([out])):
            calls.append(func.name())
            raise word("pretend: out of memory")
        return out

    given = {"engine": "vectorized", "dtype": "float64"}
    here = run(method, "mlp:64", "cpu", data, **given)
    monkeypatch.setattr(pretend, "_compute", tight)
    there = run(method, "mlp:64", DEVICE, data, **given)
    assert len(calls) == 2  # of eight, then of four; from then on no more than two at once are tried
    for path, ours in tree.items(there.shared):
        torch.testing.assert_close(ours, dict(tree.items(here.shared))[path], rtol=1e-12, atol=1e-14)
    for client in range(8):
        for ours, theirs in zip(tree.leaves(there.personal[client]), tree.leaves(here.personal[client]), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)
    most = 0
    with pytest.raises(InvalidArgument, match="too little memory for one client"):
        run(method, "mlp:64", DEVICE, data, **given)


@only_pretend
def test_another_error_of_a_device_is_not_taken_for_want_of_memory(monkeypatch):
    monkeypatch.setattr(vectorized.VectorizedEngine, "work", lambda *_: torch.zeros(2) @ torch.zeros(3))
    with pytest.raises(RuntimeError, match="inconsistent tensor size"):
        end_of(ft.FedAvg(), "linear", "vectorized", DEVICE)
