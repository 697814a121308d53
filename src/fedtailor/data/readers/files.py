"""Readers of the formats in which data sets are distributed: idx, CIFAR batches, npy and npz, LEAF json, folders of images.

Each gives plain arrays; nothing is ever unpickled. Images are unsigned bytes, channels first: [rows, channels, height, width].
"""

from __future__ import annotations

import io
import json
import math
import os
import struct
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedtailor.data.limits import check_archive, read_unpacked
from fedtailor.data.words import one_line
from fedtailor.errors import InvalidArgument, InvalidData

Bytes = NDArray[np.uint8]
Labels = NDArray[np.int64]
Place = str | os.PathLike[str]
IDX_TYPES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
UNREADABLE = (OSError, EOFError, ValueError, MemoryError, RecursionError, SyntaxError)  # what a damaged file may raise
PICTURES = (".jpg", ".jpeg", ".png", ".webp", ".bmp")


def root(data_dir: Place | None = None) -> Path:
    """Return where data sets are stored: ``data_dir``, or $FEDTAILOR_DATA, or ~/.cache/fedtailor."""
    place = data_dir or os.environ.get("FEDTAILOR_DATA") or Path("~/.cache/fedtailor")
    return Path(place).expanduser().absolute()


def module(name: str) -> Any:
    """Import an optional package by name."""
    try:
        return import_module(name)
    except ImportError as error:
        raise InvalidArgument(
            f"this data set needs the package {name.split('.')[0]!r}, which is not installed; run: pip install 'fedtailor[data]'"
        ) from error


def present(folder: Path, *names: str) -> list[Path] | None:
    """Return the files of these names (or with .gz added), or None unless all of them exist."""
    paths = [next((path for path in (folder / name, folder / f"{name}.gz") if path.is_file()), None) for name in names]
    return None if None in paths else [path for path in paths if path is not None]


def read_idx(path: Path) -> NDArray[Any]:
    """Read an idx file, plain or gzipped (MNIST, EMNIST, Fashion-MNIST, QMNIST), in the machine's byte order."""
    try:
        raw = read_unpacked(path)
    except (OSError, EOFError, zlib.error) as error:
        raise InvalidData(f"cannot read {path}: {one_line(error)}; get the file again") from error
    if len(raw) < 4 or raw[:2] != b"\0\0" or raw[2] not in IDX_TYPES or len(raw) < 4 + 4 * raw[3]:
        raise InvalidData(f"{path} is not an idx file; it must start with 00 00, a type and the number of axes")
    kind, axes = np.dtype(IDX_TYPES[raw[2]]), raw[3]
    shape = struct.unpack_from(f">{axes}I", raw, 4)
    expected, size = math.prod(shape) * kind.itemsize, len(raw) - 4 - 4 * axes
    if size != expected:
        raise InvalidData(f"{path} is cut short or too long: {size} bytes of data, not {expected}; get it again")
    return np.frombuffer(raw, kind, offset=4 + 4 * axes).reshape(shape).astype(kind.newbyteorder("="))


def read_npy(path: Path) -> NDArray[Any]:
    """Read one array; an array of Python objects is refused, because reading it could run code."""
    try:
        with path.open("rb") as file:  # opened here, because np.load leaves a file open that it cannot read
            array = np.load(file, allow_pickle=False)
    except (*UNREADABLE, zipfile.BadZipFile) as error:
        raise InvalidData(f"cannot read {path}: {one_line(error)}; write it with np.save, from numbers only") from error
    if not isinstance(array, np.ndarray):
        raise InvalidData(f"{path} holds several arrays; give a .npy file with one")
    return array


def read_npz(path: Path, *names: str) -> dict[str, NDArray[Any]]:
    """Read all arrays of an npz file, or those with these names; an array of Python objects is refused."""
    try:
        check_archive(path)
        with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
            for name in names:
                if name not in archive.files:
                    raise InvalidData(f"{path} has no array {name!r}; it has {', '.join(archive.files[:8])}")
            return {name: archive[name] for name in names or archive.files}
    except (InvalidArgument, InvalidData):
        raise
    except (*UNREADABLE, AttributeError, zipfile.BadZipFile, zlib.error) as error:
        raise InvalidData(f"cannot read {path}: {one_line(error)}; get the file again") from error


def read_pair(x: Path, y: Path) -> tuple[NDArray[Any], Labels]:
    """Read rows and class labels from two npy files (CIFAR-10.1, CIFAR-10-C, one's own); channels-last images are transposed."""
    rows, labels = read_npy(x), read_npy(y)
    if labels.ndim != 1 or len(labels) != len(rows):
        raise InvalidData(f"{x} has shape {rows.shape} and {y} {labels.shape}; give one label per row")
    if rows.ndim == 4 and rows.shape[3] in (1, 3) and rows.shape[1] not in (1, 3):
        rows = np.ascontiguousarray(rows.transpose(0, 3, 1, 2))
    return rows, labels.astype(np.int64)


def read_cifar(path: Path, label_bytes: int = 1) -> tuple[Bytes, Labels]:
    """Read a binary CIFAR batch: images [rows, 3, 32, 32] and labels [rows, label_bytes] (CIFAR-100: coarse, fine)."""
    raw = np.fromfile(path, np.uint8)
    width = label_bytes + 3072
    if not len(raw) or len(raw) % width:
        raise InvalidData(f"{path} is not a CIFAR binary batch: {len(raw)} bytes are not rows of {width}; get the .bin version")
    rows = raw.reshape(-1, width)
    return rows[:, label_bytes:].reshape(-1, 3, 32, 32), rows[:, :label_bytes].astype(np.int64)


def read_strip(data: bytes | Path) -> Bytes:
    """Read images of 32x32 packed in one lossless picture, a row of 1,024 pixels or a block of 32 lines for each."""
    pixels = picture(data)
    if pixels.size % 3072:
        raise InvalidData(f"{data if isinstance(data, Path) else 'a strip'} does not hold whole images of 32x32; get it again")
    return np.ascontiguousarray(pixels.reshape(-1, 32, 32, 3).transpose(0, 3, 1, 2))


def picture(data: bytes | Path, size: int | None = None) -> Bytes:
    """Read one picture as [height, width, 3], resized to ``size`` x ``size`` unless that is None."""
    image = module("PIL.Image")
    try:
        with image.open(io.BytesIO(data) if isinstance(data, bytes) else data) as opened:
            # a JPEG can be decoded at a fraction of its size: faster, and the resizing below evens it out
            if size is not None:
                opened.draft("RGB", (2 * size, 2 * size))
            whole = opened.convert("RGB")
            if size is not None and whole.size != (size, size):
                whole = whole.resize((size, size), image.Resampling.BOX if min(whole.size) >= size else image.Resampling.BILINEAR)
            return np.asarray(whole)
    except (OSError, SyntaxError, ValueError, image.DecompressionBombError) as error:
        source = data if isinstance(data, Path) else "a picture"
        raise InvalidData(f"cannot read {source}: {one_line(error)}; get the file again") from error


def read_packed(path: Path, size: int) -> tuple[Bytes, Labels, NDArray[np.str_], tuple[str, ...]]:
    """Read encoded pictures stored end to end in an npz: images, labels, each row's domain by name, names of the classes."""
    z = read_npz(path, "blob", "offset", "label", "domain", "class_names", "domain_names")
    blob, offset = z["blob"].tobytes(), z["offset"]
    x = _stacked(picture(blob[offset[i] : offset[i + 1]], size) for i in range(len(offset) - 1))
    return x, z["label"].astype(np.int64), z["domain_names"][z["domain"]], tuple(map(str, z["class_names"]))


def read_image_folders(folder: Path, size: int) -> tuple[Bytes, Labels, NDArray[np.str_], tuple[str, ...]]:
    """Read pictures stored as DOMAIN/CLASS/*.jpg (PACS, Office-Home); return what ``read_packed`` does."""
    paths = sorted(path for path in folder.glob("*/*/*") if path.suffix.lower() in PICTURES)
    if not paths:
        raise InvalidData(f"{folder} has no pictures as DOMAIN/CLASS/*.jpg; lay them out so")
    classes = sorted({path.parent.name for path in paths})
    y = np.array([classes.index(path.parent.name) for path in paths], np.int64)
    return _stacked(picture(path, size) for path in paths), y, np.array([p.parent.parent.name for p in paths]), tuple(classes)


def _stacked(pictures: Iterator[Bytes]) -> Bytes:
    return np.ascontiguousarray(np.stack(list(pictures)).transpose(0, 3, 1, 2))


def is_leaf(folder: Path) -> bool:
    """Return whether a directory holds LEAF json: in itself, in all_data/, or in train/ and test/ (also below data/)."""
    return any(_leaf_files(place) for place in _leaf_places(folder))


def read_leaf(folder: Path) -> dict[str, dict[str, tuple[NDArray[Any], NDArray[Any]]]]:
    """Read LEAF's users, by split: {"all": {user: (x, y)}}, or {"train": ..., "test": ...} where it is split already."""
    for base in (folder, folder / "data"):
        if all(_leaf_files(base / part) for part in ("train", "test")):
            return {part: _leaf_users(_leaf_files(base / part)) for part in ("train", "test")}
    for place in _leaf_places(folder):
        if files := _leaf_files(place):
            return {"all": _leaf_users(files)}
    raise InvalidData(f"{folder} holds no LEAF json (objects with 'users' and 'user_data'), nor does its all_data/ or train/")


def _leaf_places(folder: Path) -> list[Path]:
    inside = ("all_data", "train")
    return [folder, *(folder / name for name in inside), *(folder / "data" / name for name in inside)]


def _leaf_files(folder: Path) -> list[Path]:
    """Return the json files that name users near their start or their end, where LEAF writes them."""
    return [path for path in sorted(folder.glob("*.json")) if b'"user_data"' in _ends(path)]


def _ends(path: Path, count: int = 1 << 20) -> bytes:
    with path.open("rb") as file:
        start = file.read(count)
        file.seek(max(0, path.stat().st_size - count))
        return start + file.read(count)


def _leaf_users(paths: Sequence[Path]) -> dict[str, tuple[NDArray[Any], NDArray[Any]]]:
    users: dict[str, tuple[NDArray[Any], NDArray[Any]]] = {}
    for path in paths:
        data = read_json(path)
        if not isinstance(data, Mapping) or not isinstance(data.get("user_data"), Mapping):
            raise InvalidData(f"{path} is not LEAF json; it must be an object with 'users' and 'user_data'")
        for user in data.get("users", data["user_data"]):
            rows = data["user_data"].get(user)
            if not isinstance(rows, Mapping) or "x" not in rows or "y" not in rows:
                raise InvalidData(f"{path} has no x and y for user {user!r}; get the file again")
            if user in users:
                raise InvalidData(f"user {user!r} is in two LEAF files, last in {path}; keep one of them")
            users[user] = _numbers(path, user, rows["x"]), _numbers(path, user, rows["y"])
    return users


def _numbers(path: Path, user: str, values: Any) -> NDArray[Any]:
    try:
        array = np.asarray(values)
    except ValueError as error:
        raise InvalidData(f"{path}: the rows of user {user!r} have different lengths; give every row the same") from error
    if array.dtype.kind not in "biuf":
        raise InvalidData(f"{path}: user {user!r} holds text, and a federation holds numbers; encode it as numbers first")
    return array.astype(np.float32) if array.dtype.kind == "f" else array


def read_json(path: Path) -> Any:
    try:
        return json.loads(read_unpacked(path))
    except (InvalidArgument, InvalidData):
        raise
    except (*UNREADABLE, zlib.error) as error:
        raise InvalidData(f"cannot read {path}: {one_line(error)}; get the file again") from error


def shakespeare(data_dir: Place | None = None) -> dict[str, str]:
    """Return the text of every role in Shakespeare's plays, by PLAY_ROLE; from shakespeare/shakespeare_by_role.json.gz."""
    path = root(data_dir) / "shakespeare" / "shakespeare_by_role.json.gz"
    if not path.is_file():
        raise InvalidArgument(
            f"{path} is not there; put the file there, or say where the data are with data_dir= or $FEDTAILOR_DATA"
        )
    roles = read_json(path)
    if not isinstance(roles, Mapping) or "roles" not in roles:
        raise InvalidData(f"{path} has no 'roles'; get the file again")
    return {role["user"]: "\n".join(role["speeches"]) for role in roles["roles"]}
