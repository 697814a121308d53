"""Folders of images: in every client's folder, a folder per class."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fedtailor.data.federation import Federation
from fedtailor.data.schema import Features
from fedtailor.data.tables.arrays import from_features
from fedtailor.data.tables.options import FolderOptions
from fedtailor.data.tables.pieces import category_column, parent_and_name
from fedtailor.data.tables.read import LAYOUTS, entries, has_ending
from fedtailor.data.tables.target import class_target
from fedtailor.data.words import one_line
from fedtailor.errors import InvalidArgument, InvalidData

IMAGE_ENDS = (".png", ".jpg", ".jpeg")


def from_images(root: Path, folders: Sequence[Path], options: FolderOptions, name: str) -> Federation:
    """Read one folder per client, with a folder of images per class in it."""
    paths: list[Path] = []
    for folder in folders:
        client_paths = [f for kind in entries(folder)[1] for f in entries(kind)[0] if has_ending(f, IMAGE_ENDS)]
        if not client_paths:
            raise InvalidData(f"the folder {folder.name!r} of {str(root)!r} holds neither tables nor images by class; {LAYOUTS}")
        paths += client_paths
    x = _load_images(paths, options.image_size)
    owner = category_column([path.parent.parent.name for path in paths], [1] * len(paths))
    kinds = category_column([path.parent.name for path in paths], [1] * len(paths))
    target = class_target("the folder of an image", kinds, "a folder is a class")
    return from_features(x, target, owner, None, options, name)


def _load_images(paths: Sequence[Path], size: int | tuple[int, int] | None) -> Features:
    """Return images [rows, channels, height, width] with values in [0, 1]; in color if any of them is."""
    try:
        from PIL import Image
    except ImportError as error:
        raise InvalidArgument("reading images needs pillow; install fedtailor[data]") from error
    height, width = (size, size) if isinstance(size, int) else size or (0, 0)
    if size is not None and min(height, width) < 1:
        raise InvalidArgument(f"image_size={size!r} must be a number of pixels, or (height, width)")
    images = []
    for path in paths:
        try:
            with Image.open(path) as file:
                whole = file.convert("L" if file.mode in ("1", "L", "LA") else "RGB")
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
            raise InvalidData(
                f"{parent_and_name(path)!r} is no image that can be read ({one_line(error)}); replace or remove it"
            ) from error
        images.append(whole if size is None else whole.resize((width, height)))
    for path, image in zip(paths, images, strict=True):
        if image.size != images[0].size:
            raise InvalidData(
                f"{parent_and_name(path)!r} has {image.width}x{image.height} pixels but {parent_and_name(paths[0])!r} has "
                f"{images[0].width}x{images[0].height}; give image_size= to resize them"
            )
    mode = "RGB" if any(image.mode == "RGB" for image in images) else "L"
    pixels = np.stack([np.asarray(image.convert(mode), np.uint8) for image in images])
    pixels = pixels[:, None] if mode == "L" else np.moveaxis(pixels, -1, 1)
    return np.ascontiguousarray(pixels, np.float32) / np.float32(255)
