"""Where shards are: what an engine asks of them, in this process or (``nodes``) on a cluster."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from fedtailor.engine.shards import Shard, packed, unpacked
from fedtailor.server.reduce import Reduce

Calls = Mapping[int, tuple[Any, ...]]  # arguments by shard


class Crew(Protocol):
    """The processes in which shards are. Calls give (results by shard, the shards that are lost)."""

    @property
    def count(self) -> int: ...

    def each(self, method: str, common: Any, calls: Calls) -> tuple[dict[int, Any], list[int]]:
        """Call a method of some shards at once; ``common`` is sent once, and comes first unless it is None."""
        ...

    def chain(self, shards: Sequence[int], reduce: Reduce | None) -> tuple[Any, list[int]]:
        """Hand a sum on from shard to shard, and return it; without ``reduce`` the method's own is made there."""
        ...

    def replace(self, shard: int) -> None:
        """Start a shard again, elsewhere; its clients are as before the first round."""
        ...

    def close(self) -> None: ...


class Here:
    """Shards in this process, which what is sent leaves and enters again."""

    def __init__(self, shards: Sequence[Shard]) -> None:
        self.shards = list(shards)

    @property
    def count(self) -> int:
        return len(self.shards)

    def each(self, method: str, common: Any, calls: Calls) -> tuple[dict[int, Any], list[int]]:
        out = {}
        for number, arguments in calls.items():
            first = () if common is None else (unpacked(packed(common)),)
            out[number] = unpacked(packed(getattr(self.shards[number], method)(*first, *unpacked(packed(arguments)))))
        return out, []

    def chain(self, shards: Sequence[int], reduce: Reduce | None) -> tuple[Any, list[int]]:
        state = None
        for number in shards:
            state = unpacked(packed(self.shards[number].fold(reduce, state)))
        return state, []

    def replace(self, shard: int) -> None:
        old = self.shards[shard]
        self.shards[shard] = Shard(old.plan, old.inner, old.parts)

    def close(self) -> None:
        pass
