"""Networks that are their layers one after another, so that they can be routed, cut and frozen layer by layer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from torch import Tensor, nn

from fedtailor.errors import InvalidArgument, ModelMismatch

TRAIN = ("all", "adapter", "head")
NORMS = ("batch", "group")


class Chain(nn.Module):
    """``blocks`` are the paths of the layers in order, ``groups`` name parts of the network by the paths of their modules."""

    blocks: tuple[str, ...] = ()
    inner: tuple[str, ...] = ()  # those blocks that repeat: residual blocks, transformer layers
    groups: Mapping[str, tuple[str, ...]] = {}
    notes: tuple[str, ...] = ()
    rows_apart = True

    def forward(self, input: Tensor) -> Tensor:
        for path in self.blocks:
            input = self.get_submodule(path)(input)
        return input

    def paths(self, *kinds: type[nn.Module]) -> tuple[str, ...]:
        """Return the paths of the modules of these kinds."""
        return tuple(path for path, module in self.named_modules() if isinstance(module, kinds))

    def with_adapters(self, adapt: Sequence[bool]) -> tuple[str, ...]:
        """Return those of ``inner`` that have adapters; all if none has (the group ``adapter`` is then norms and head)."""
        return tuple(path for path, adapted in zip(self.inner, adapt, strict=True) if adapted or not any(adapt))

    def train_only(self, part: str, last: int | None = None) -> None:
        """Freeze everything but a group (``all`` freezes nothing), and all blocks before the ``last`` ones of ``inner``."""
        if part not in TRAIN or (part != "all" and part not in self.groups):
            known = [name for name in TRAIN if name == "all" or name in self.groups]
            raise InvalidArgument(f"train must be one of {', '.join(known)}, not {part!r}")
        self.requires_grad_(part == "all")
        for path in self.groups.get(part, ()):
            self.get_submodule(path).requires_grad_(True)
        if last is not None:
            for path in self.blocks[: self.blocks.index(self.inner[-last])]:
                self.get_submodule(path).requires_grad_(False)


def adapted(count: int, adapters: bool, last: int | None) -> tuple[bool, ...]:
    """Return which of ``count`` blocks have adapters: none, all, or the ``last`` ones."""
    if last is not None and not 1 <= last <= count:
        raise InvalidArgument(f"last must be from 1 to {count}, the number of blocks, not {last!r}")
    return tuple(adapters and (last is None or i >= count - last) for i in range(count))


class Image(nn.Module):
    """(n, h, w) or (n, c, h, w) to (n, c, h, w); with ``mean`` and ``std``, scaled: (x - mean)/std."""

    rows_apart = True

    def __init__(self, mean: float = 0.0, std: float = 1.0) -> None:
        super().__init__()
        self.mean, self.std = mean, std

    def extra_repr(self) -> str:
        return f"mean={self.mean}, std={self.std}"

    def forward(self, input: Tensor) -> Tensor:
        x = input.unsqueeze(-3) if input.dim() == 3 else input
        return x if (self.mean, self.std) == (0.0, 1.0) else (x - self.mean) / self.std


class Mean(nn.Module):
    """Average over height and width: (n, c, h, w) to (n, c)."""

    rows_apart = True

    def forward(self, input: Tensor) -> Tensor:
        return input.mean((-2, -1))


def channels_of(name: str, shape: Iterable[int]) -> int:
    """Return the number of channels of one input, (height, width) or (channels, height, width)."""
    sides = tuple(shape)
    if len(sides) not in (2, 3) or min(sides[-2:]) < 4:
        raise ModelMismatch(
            f"{name} needs images of shape (height, width) or (channels, height, width), at least 4x4, not {sides}; "
            "reshape the features or use the model 'mlp'"
        )
    return 1 if len(sides) == 2 else sides[0]


def norm_of(kind: str) -> Callable[[int], nn.Module]:
    """Return a maker of norms: batch norm, or group norm with at most 32 groups of at least 8 channels."""
    if kind not in NORMS:
        raise InvalidArgument(f"norm must be one of {', '.join(NORMS)}, not {kind!r}")
    if kind == "batch":
        return nn.BatchNorm2d

    def group(channels: int) -> nn.GroupNorm:
        count = max(1, min(32, channels // 8))
        while channels % count:
            count -= 1
        return nn.GroupNorm(count, channels)

    return group
