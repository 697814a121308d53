"""Methods that are not ours: how they are named, recorded, fetched again, and refused; and that ours need no list."""

from __future__ import annotations

import ast
import contextlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tokenize
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest

import fedtailor as ft
from fedtailor.algorithms import METHODS, origin
from fedtailor.algorithms.settings import find, label_of, recall, slug, spec
from fedtailor.cli import main
from fedtailor.errors import BadRun, FedtailorError, InvalidArgument
from fedtailor.runs import models
from fedtailor.runs.contents import write_manifest
from tests.commands import Command

SRC, HERE = Path(ft.__file__).parents[1], Path(__file__).parents[1]
# the package's names beside the methods: what a caller may rely on
PUBLIC = """
Adam Advice Algorithm Comparison Cosine Exponential FederatedClassifier FederatedRegressor Federation Harmonic Lambda Limit
Milestones Mixed Optimizer Private Round Run SGD Schedule Sweep Task TorchOptimizer Work advise check_algorithm check_model
compare data descend errors models onboard param prox run save_shards scan sweep tree
"""
# one model for all that forgets: its predictions are those of FedAvg with half the weights, so that the two cannot be confused
SOURCE = '''
"""A method of one's own."""
from dataclasses import dataclass

import fedtailor as ft
from fedtailor import tree
from fedtailor.local import descend

SHARE = 0.5  # of a step


def unused():
    return 1


def moved(model, delta):
    return tree.move(model, delta, SHARE)


@dataclass(frozen=True, kw_only=True)
class FedAvg(ft.Algorithm):
    """Half a step."""

    lam: float = 0.1

    def init_server(self, task):
        return {"model": task.init()}, {}

    def client_update(self, task, shared, personal, data, rnd):
        new = descend(task.risk, shared["model"], data, self.optimizer(rnd))
        return {"delta": tree.sub(new, shared["model"])}, personal

    def server_update(self, task, shared, server, upload, rnd):
        return {"model": moved(shared["model"], upload["delta"])}, server

    def predict(self, task, shared, personal, x):
        return task.apply(shared["model"], x)


class Mine(FedAvg):
    pass


if __name__ == "__main__":
    SHARE = 3
'''
RUN = ("digits", "--clients", "3", "--rounds", "2", "--evaluate-every", "0")


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A working directory with mine.py in it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", list(sys.path))
    Path("mine.py").write_text(SOURCE)
    return tmp_path


def command(monkeypatch, *words):
    """The exit code of a command in this process."""
    monkeypatch.setattr("sys.argv", ["fedtailor", *map(str, words)])
    with pytest.raises(SystemExit) as ended:
        main()
    return ended.value.code or 0


def elsewhere(*words, cwd="."):
    """What the command ends with, its output and its errors, in a process of its own, which has defined nothing."""
    with contextlib.chdir(cwd):
        return Command(*words).wait(300)


def data():
    return ft.Federation.load("digits", clients=3)


# -- names ------------------------------------------------------------------------------------------------------------------
def test_a_class_is_found_by_its_file_by_its_module_and_by_its_name(here):
    kind = find("mine.py:FedAvg")
    assert kind is not ft.FedAvg
    assert find("mine.py:FedAvg") is kind  # not executed again
    assert find("fedavg") is ft.FedAvg  # ours come first
    assert find("Mine") is find("mine.py:Mine")
    Path("pack").mkdir()
    Path("pack/inner.py").write_text(SOURCE)
    assert find("pack.inner:FedAvg") is sys.modules["pack.inner"].FedAvg
    assert spec(find("pack.inner:FedAvg")).startswith("pack.inner:FedAvg@")
    assert spec(kind).startswith("mine.py:FedAvg@")
    assert (spec(ft.FedProxPersonal), label_of(kind), label_of(find("mine.py:Mine"))) == (
        "fedprox-personal",
        "FedAvg (mine.py)",
        "Mine",
    )


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("nowhere.py:A", "give a Python file and a class in it"),
        ("no.such.module:A", "give a Python file and a class in it"),
        ("mine.py:", "give a Python file and a class in it"),
        ("mine.py:Other", "has no class 'Other'"),
        ("mine.py:unused", "has no class 'unused'"),
        ("mine.py:dataclass", "has no class 'dataclass'"),
        ("broken.py:A", "cannot be imported \\(ZeroDivisionError"),
        ("abstract.py:A", "abstract.py:A cannot be used: it lacks client_update"),
        ("abstract.py:B", "needs an Algorithm as its base"),
        ("fedavgg", "one of your own is given as mine.py:MyMethod"),
    ],
)
def test_what_is_no_method_is_refused(here, name, says):
    Path("broken.py").write_text("class A: pass\n1/0")
    Path("abstract.py").write_text("import fedtailor as ft\nclass A(ft.Algorithm):\n    pass\nclass B:\n    pass\n")
    with pytest.raises(InvalidArgument, match=says):
        find(name)


# -- fingerprints -------------------------------------------------------------------------------------------------------------
SAME = {
    "a comment": ("    lam: float", "    # why\n    lam: float"),
    "a docstring": ('"""Half a step."""', '"""Half."""'),
    "what it does not reach": ("return 1", "return 2"),
    "what only runs as a script": ("SHARE = 3", "SHARE = 4"),
    "layout": ("{}\n\n    def client", "{}\n    def client"),
}
OTHER = {
    "a default": ("float = 0.1", "float = 0.2"),
    "a function that it calls": ("tree.move(model, delta, SHARE)", "tree.move(model, delta, 1.0)"),
    "a number that this uses": ("SHARE = 0.5", "SHARE = 0.6"),
    "an import": ("from fedtailor import tree", "from mytree import tree"),
}


@pytest.mark.parametrize("change", [*SAME, *OTHER])
def test_a_fingerprint_covers_what_the_class_reaches_and_no_more(here, change):
    old, new = {**SAME, **OTHER}[change]
    assert old in SOURCE
    before = origin.fingerprint(here / "mine.py", "Mine")
    (here / "mine.py").write_text(SOURCE.replace(old, new))
    os.utime(here / "mine.py", ns=(1, 1))  # the clock of the file system may be coarse
    assert (origin.fingerprint(here / "mine.py", "Mine") == before) is (change in SAME)


def test_a_fingerprint_covers_bases_and_functions_in_files_beside_it(here):
    Path("helper.py").write_text(SOURCE.replace("SHARE = 0.5", "SHARE = 0.25"))
    Path("mine.py").write_text(
        "import helper\nfrom helper import FedAvg\n\nclass Mine(FedAvg):\n    x = 1\n\nclass All(helper.Mine): pass\n"
    )
    before = {name: origin.fingerprint(here / "mine.py", name) for name in ("Mine", "All")}
    Path("helper.py").write_text(SOURCE.replace("SHARE = 0.5", "SHARE = 0.125"))
    os.utime("helper.py", ns=(1, 1))
    after = {name: origin.fingerprint(here / "mine.py", name) for name in ("Mine", "All")}
    assert before["Mine"] != after["Mine"]
    assert before["All"] != after["All"]
    assert None not in {*before.values(), *after.values()}


# -- the command line -----------------------------------------------------------------------------------------------------------
def test_a_method_of_ones_own_runs_predicts_and_is_exported(here, monkeypatch):
    """Made by another process: nothing but the directory says where the class is."""
    Path("mine.py").write_text(SOURCE.replace("SHARE = 0.5", "SHARE = 0.4375"))
    code, out, err = elsewhere("run", "mine.py:FedAvg", *RUN, "--lam", "0.3", "--out", "run", "--json")
    assert code == 0, err
    assert json.loads(out)["source"].startswith("mine.py:FedAvg@")
    assert 'method = "mine.py:FedAvg@' in Path("run/config.toml").read_text()
    x = data().test.client(0)[0]
    saved = models.read(here / "run")
    assert type(saved.algorithm) is find("mine.py:FedAvg")
    ours = ft.run(ft.FedAvg(), data(), rounds=2, batch_size=16, evaluate_every=0)
    assert not np.allclose(saved.predict(saved.clients[0], x), ours.predict(0, x))
    np.savetxt("rows.csv", x.reshape(len(x), -1), delimiter=",", header=",".join(f"c{i}" for i in range(64)), comments="")
    assert command(monkeypatch, "predict", "run", "rows.csv", "--client", saved.clients[0], "--to", "out.csv") == 0
    assert command(monkeypatch, "export", "run", "--to", "model.safetensors") == 0


def test_a_run_that_was_stopped_goes_on_with_the_same_class(here, monkeypatch):
    options = {"batch_size": 16, "evaluate_every": 0, "engine": "loop", "workers": 1}
    method = find("mine.py:FedAvg")()

    def stop(record):
        if record["round"] == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ft.run(method, data(), rounds=4, out="cut", checkpoint_every=1, callback=stop, **options)
    whole = ft.run(method, data(), rounds=4, **options)
    code, out, err = elsewhere("resume", "cut", "--json")
    assert code == 0, err
    assert json.loads(out)["loss_personal"] == whole.summary["loss_personal"]


def test_compare_takes_methods_of_ones_own_beside_ours_of_the_same_name(here, monkeypatch, capsys):
    words = (
        "compare",
        *RUN,
        "--methods",
        "fedavg,mine.py:FedAvg,mine.py:Mine",
        "--set",
        "mine.lam=0.7",
        "--out",
        "all",
        "--json",
    )
    assert command(monkeypatch, *words) == 0
    rows = {row["method"]: row for row in json.loads(capsys.readouterr().out)["methods"]}
    assert set(rows) == {"FedAvg", "FedAvg (mine.py)", "Mine"}
    assert rows["FedAvg"]["loss_personal"] < rows["FedAvg (mine.py)"]["loss_personal"] == rows["Mine"]["loss_personal"]
    assert "lam=0.7" in rows["Mine"]["settings"]
    assert command(monkeypatch, "resume", "all", "--json") == 0
    assert command(monkeypatch, "export", "all", "--method", "FedAvg (mine.py)") == 0
    Path("mine.py").write_text(SOURCE.replace("0.5", "0.6"))
    code, _, err = elsewhere("resume", "all")
    assert code == 2
    assert "now holds FedAvg@" in err


def test_check_and_list_take_a_method_of_ones_own(here, monkeypatch, capsys):
    assert command(monkeypatch, "check", "mine.py:Mine", "--json") == 0
    assert {row["law"] for row in json.loads(capsys.readouterr().out)} >= {1, 2, 3}
    assert command(monkeypatch, "list", "algorithms", "--method", "mine.py:Mine", "--json") == 0
    assert [row["name"] for row in json.loads(capsys.readouterr().out)] == ["Mine"]


def test_the_words_may_stand_in_either_order_and_a_wrong_class_is_named(here, monkeypatch, capsys):
    assert command(monkeypatch, "run", "digits", "mine.py:Mine", *RUN[1:], "--out", "a") == 0
    assert command(monkeypatch, "run", "mine.py:Absent", "digits") == 2
    assert "has no class 'Absent'" in capsys.readouterr().err


def test_sweep_takes_a_method_of_ones_own(here, monkeypatch, capsys):
    words = ("sweep", "digits", "--clients", "3", "--rounds", "2", "--lams", "0.1,1", "--method")
    assert command(monkeypatch, *words, "mine.py:Mine", "--json") == 0
    path = json.loads(capsys.readouterr().out)["path"]
    assert [(one["lam"], one["settings"].partition("(")[0]) for one in path] == [(0.1, "Mine"), (1.0, "Mine")]
    assert command(monkeypatch, *words, "fedavg") == 2
    assert "fedavg cannot be swept: it has no setting lam" in capsys.readouterr().err


# -- refusals -------------------------------------------------------------------------------------------------------------------
UNKNOWN = SOURCE.replace("SHARE = 0.5", "SHARE = 0.375")  # a source that this process never executes


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A run of a class of mine.py, made by another process."""
    folder = tmp_path_factory.mktemp("made")
    (folder / "mine.py").write_text(UNKNOWN)
    code, _, err = elsewhere("run", "mine.py:FedAvg", *RUN, "--out", "run", cwd=folder)
    assert code == 0, err
    return folder / "run"


@pytest.fixture
def finished(here, made):
    Path("mine.py").write_text(UNKNOWN)
    shutil.copytree(made, "run")
    return here / "run"


def changed(folder):
    Path("mine.py").write_text(UNKNOWN.replace("SHARE = 0.375", "SHARE = 1.0\nopen('executed', 'w')"))


def deleted(folder):
    Path("mine.py").unlink()


def another(folder):
    Path("mine.py").write_text("import fedtailor as ft\nopen('executed', 'w')\nFedAvg = ft.FedAvg\n")


def gone(folder):
    Path("mine.py").write_text("open('executed', 'w')\n")


def resealed(folder):
    """Fit the manifest to the files, as whoever means harm would."""
    write_manifest(folder, json.loads((folder / "manifest.json").read_text())["files"])


def inside(folder):
    shutil.move("mine.py", folder / "mine.py")
    for name in ("config.toml", "models/models.json"):
        text = (folder / name).read_text()
        (folder / name).write_text(text.replace("mine.py:", f"{folder.name}/mine.py:"))
    resealed(folder)


def unmarked(folder):
    for name in ("config.toml", "models/models.json"):
        (folder / name).write_text(re.sub(r"mine.py:FedAvg@\w+", "mine.py:FedAvg", (folder / name).read_text()))
    resealed(folder)


REFUSALS = {
    changed: r"made with mine.py:FedAvg@\w+ and mine.py now holds FedAvg@\w+",
    deleted: r"made with mine.py:FedAvg@\w+ and there is no mine.py in",
    another: r"made with mine.py:FedAvg@\w+ and mine.py now holds FedAvg@\w+",
    gone: r"made with mine.py:FedAvg@\w+ and .*mine.py has no class 'FedAvg' now",
    inside: r"lies inside the run directory; code that comes with a run is never executed",
    unmarked: r"does not say which source mine.py:FedAvg had",
}


@pytest.mark.parametrize("change", REFUSALS, ids=lambda change: change.__name__)
def test_a_run_is_not_read_with_anything_but_its_own_class(finished, change, monkeypatch, capsys):
    change(finished)
    np.savetxt("rows.csv", np.zeros((2, 64)), delimiter=",", header=",".join(f"c{i}" for i in range(64)), comments="")
    for words in (("resume", "run"), ("predict", "run", "rows.csv", "--client", "0"), ("export", "run")):
        assert command(monkeypatch, *words) == 2
        assert re.search(REFUSALS[change], capsys.readouterr().err)
    assert not Path("executed").exists()


def test_ours_is_not_resumed_as_a_users_class_of_the_same_name_nor_the_other_way_round(here):
    mine = find("mine.py:FedAvg")
    for first, second in ((ft.FedAvg(), mine()), (mine(), ft.FedAvg())):
        out = here / f"run {spec(first).partition(':')[0]}"
        ft.run(first, data(), rounds=1, out=out)
        with pytest.raises(BadRun, match=r"method='FedAvg.*, not 'FedAvg"):
            ft.run(second, data(), rounds=1, out=out, resume=True)
        assert type(models.read(out).algorithm) is type(first)


def test_a_class_without_a_file_is_resumed_where_it_is_defined_and_nowhere_else(here):
    def define(half):
        @dataclass(frozen=True, kw_only=True)
        class Typed(ft.FedAvg):
            share: float = half

        return Typed

    kind = define(0.5)
    assert spec(kind) == "(no file):Typed"
    notes = ft.run(kind(), data(), rounds=1, out="typed").summary["notes"]
    assert any("only where a class Typed is defined again" in note for note in notes)
    assert type(models.read(Path("typed")).algorithm) is kind
    code, _, err = elsewhere("resume", "typed")
    assert code == 2
    assert "a class that was in no file" in err
    assert "no class of that name" in err
    with pytest.raises(BadRun, match="this process has no class of that name"):
        recall("(no file):Untyped", Path("typed"))


def test_a_run_directory_that_names_no_method_of_ours_is_refused_though_such_a_class_is_defined(here):
    find("mine.py:Mine")
    with pytest.raises(BadRun, match="'mine', which is no method of ours"):
        recall("mine", here)
    assert recall("FedProxPersonal", here) is recall("fedprox-personal", here) is ft.FedProxPersonal


# -- ours ---------------------------------------------------------------------------------------------------------------------
def test_the_packages_names_are_exact_and_importing_it_is_quick():
    script = (
        "import sys, fedtailor as ft\n"
        "assert 'torch' not in sys.modules and 'fedtailor.algorithms' not in sys.modules\n"
        "assert ft.Federation and 'fedtailor.algorithms' not in sys.modules\n"
        "space = {}\nexec('from fedtailor import *', space)\n"
        "from fedtailor.algorithms import METHODS\n"
        "assert set(space) - {'__builtins__'} == set(ft.__all__) == set(dir(ft)) - {'__version__'}\n"
        "assert all(space[m.__name__] is getattr(ft, m.__name__) is m for m in METHODS)\n"
        "assert len(ft.__all__) == len(set(ft.__all__)) and not hasattr(ft, 'Nothing') and not hasattr(ft, 'nothing')\n"
        "print(*sorted(set(ft.__all__) - {m.__name__ for m in METHODS}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], env={**os.environ, "PYTHONPATH": str(SRC)}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == sorted(set(PUBLIC.split()))


def test_methods_stand_by_family():
    families = [method.family for method in METHODS]
    assert families == sorted(families, key=families.index)
    assert "others" not in families
    assert METHODS[0] is ft.Local


NEW = '''"""Forgetful: FedAvg that goes half way.

What it does
    Half of FedAvg's step.
Reference
    Nobody 2030.
"""

from dataclasses import dataclass

from fedtailor import tree
from fedtailor.algorithms.base import Algorithm
from fedtailor.local import descend


@dataclass(frozen=True, kw_only=True)
class Forgetful(Algorithm):
    family = "one model for all"

    def init_server(self, task):
        return {"model": task.init()}, {}

    def client_update(self, task, shared, personal, data, rnd):
        new = descend(task.risk, shared["model"], data, self.optimizer(rnd))
        return {"delta": tree.sub(new, shared["model"])}, personal

    def server_update(self, task, shared, server, upload, rnd):
        return {"model": tree.move(shared["model"], upload["delta"], 0.5)}, server

    def predict(self, task, shared, personal, x):
        return task.apply(shared["model"], x)
'''


SCRIPT = """
import contextlib, io, json, sys
import fedtailor as ft
from fedtailor.advisor import card
from fedtailor.advisor.table import costs, evidence
from fedtailor.algorithms import METHODS
from fedtailor.cli import main
from tests.oracles.test_oracles import wanted

def command(*words):
    sys.argv, out = ["fedtailor", *words, "--json"], io.StringIO()
    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(out):
        main()
    return json.loads(out.getvalue())

facts = card(ft.Forgetful())
print(json.dumps({
    "all": "Forgetful" in ft.__all__, "dir": "Forgetful" in dir(ft), "methods": [m.__name__ for m in METHODS],
    "card": facts.name, "row": evidence(ft.Forgetful), "costs": costs(facts)["method"], "oracles": wanted(METHODS),
    "laws": len(command("check", "forgetful")), "list": command("list", "algorithms", "--method", "forgetful")[0]["name"],
    "run": command("run", "forgetful", "digits", "--clients", "3", "--rounds", "1", "--out", "run")["source"]}))
"""


@pytest.fixture(scope="module")
def extended(tmp_path_factory):
    """What is found in a copy of the sources that has one more file."""
    copy = tmp_path_factory.mktemp("copy")
    shutil.copytree(SRC / "fedtailor", copy / "fedtailor")
    (copy / "fedtailor/algorithms/forgetful.py").write_text(NEW)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(copy), str(HERE.parent)]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=env, cwd=copy, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_new_method_is_one_new_file(extended):
    """The names, the command line, the laws, the card and the documentation's rows have it."""
    assert extended["all"] is extended["dir"] is True
    assert extended["card"] == extended["costs"] == extended["list"] == extended["row"]["method"] == "Forgetful"
    assert extended["methods"][extended["methods"].index("Forgetful") - 1] == "FedYogi"  # by family, then by name
    assert (extended["row"]["reference"], extended["row"]["laws, linear"]) == ("Nobody 2030.", "9 of 9")
    assert extended["laws"] > 8
    assert extended["run"] == "forgetful"


def test_the_oracle_of_a_new_method_is_asked_for_by_name(extended):
    assert extended["oracles"] == ["tests/oracles/forgetful.py"]


# -- no method is named where all of them are served ---------------------------------------------------------------------------
ROOMS = ("engine", "metrics", "privacy", "report", "theory/resolve.py")


def named(path, names, words):
    """(line, text) of every identifier that is a method's name, and of every string that is nothing but one."""
    prose = {node.lineno for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Expr)}
    for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
        if token.type == tokenize.NAME and (token.string in names or token.string in words):
            yield token.start[0], token.string
        if token.type == tokenize.STRING and token.start[0] not in prose:
            try:
                text = ast.literal_eval(token.string)
            except (SyntaxError, ValueError):
                continue  # an f-string is a sentence
            if text in names or text in words:
                yield token.start[0], token.string


def test_rooms_that_serve_every_method_name_none():
    names = {method.__name__ for method in METHODS}
    # a method by its module or on the command line; "local" is also a room, and an English word
    words = {method.__module__.rpartition(".")[2] for method in METHODS} | {slug(method) for method in METHODS}
    words -= {"local"}
    src = Path(import_module("fedtailor").__file__).parent
    files = [file for room in ROOMS for file in ([src / room] if room.endswith(".py") else sorted((src / room).glob("*.py")))]
    assert len(files) > 30
    assert [(file.name, *where) for file in files for where in named(file, names, words)] == []
    flow = src / "algorithms/flow.py"
    assert {text for _, text in named(flow, names, words)} >= {"Flow", '"FedAvgFT"'}  # it can find what it looks for


def test_every_refusal_of_a_spec_is_one_of_ours(here):
    for name in ("a:b:c", ":", "mine.py:FedAvg@", "@x:y", "..:A", "mine.py:FedAvg@0000", " :A"):
        with pytest.raises(FedtailorError):
            find(name)
