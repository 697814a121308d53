"""Nodes of a cluster, by Ray; the only file that imports it. A shard is an actor, and dies with its node; a run is a task."""

from __future__ import annotations

import logging
import os
import socket
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from fedtailor.algorithms.base import Algorithm
from fedtailor.data.federation import Federation
from fedtailor.engine import parcel
from fedtailor.engine.base import Plan
from fedtailor.engine.options import Options
from fedtailor.engine.pool import cores
from fedtailor.engine.shards import Shard, alone, packed, unpacked
from fedtailor.errors import FedtailorError, InvalidArgument, WorkerDied
from fedtailor.server.reduce import Reduce

QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0", "RAY_DEDUP_LOGS": "0"}
KNOCK = 5.0  # seconds in which a cluster must be heard at its address
FREED, POLL = 3.0, 0.05  # seconds in which the CPUs of an earlier run must be free, and between looks
START = 120.0  # seconds in which a shard must have begun
Recipe = tuple[Plan, str, int]  # what ``Shard`` is made of
Work = Callable[[Algorithm, Federation, Any, Options], Any]  # what a task does with a method, rows, a model and options


@dataclass(eq=False)
class Session:
    """A connection to a cluster: the CPUs that shards may have, and whether the cluster is ours to end."""

    cpus: int
    own: bool

    def close(self) -> None:
        import ray

        if self.own:
            ray.shutdown()


@contextmanager
def connect(options: Options) -> Iterator[Session]:
    """Connect to the cluster at the address, or start one on this machine; what fails within ends it again."""
    if find_spec("ray") is None:
        raise InvalidArgument('engine="ray" needs the package ray: pip install "fedtailor[ray]"')
    os.environ.update(QUIET)
    import ray

    ours = not ray.is_initialized()
    if ours:
        quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR, "include_dashboard": False}
        if options.address is not None:
            del quiet["include_dashboard"]
            quiet["address"] = options.address
            if os.environ.get("RAY_ADDRESS") == "local":  # what a simulation by Flower in this process asked for
                del os.environ["RAY_ADDRESS"]
        else:
            quiet |= {"address": "local", "num_cpus": options.workers or cores()}
        try:
            _knock(options.address)
            ray.init(**quiet)
        except (ConnectionError, RuntimeError, ValueError, OSError) as error:
            first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise InvalidArgument(
                f"there is no cluster at address={options.address!r} ({first}); start one with ray start --head, or leave "
                "address out"
            ) from error
    session = Session(_cpus(options), ours)
    try:
        yield session
    except BaseException:
        session.close()
        raise


def _knock(address: str | None) -> None:
    """Fail at once where nobody listens at HOST:PORT, for which Ray would wait minutes."""
    host, _, port = (address or "").removeprefix("ray://").rpartition(":")
    if port.isdecimal():
        socket.create_connection((host.strip("[]") or "127.0.0.1", int(port)), KNOCK).close()


def _cpus(options: Options) -> int:
    """Return how many CPUs shards may have; those of a run that has just ended are waited for."""
    import ray

    wanted, until = options.workers or int(ray.cluster_resources().get("CPU", 0)), time.monotonic() + FREED
    while (free := int(ray.available_resources().get("CPU", 0))) < wanted and time.monotonic() < until:
        time.sleep(POLL)
    if free < 1:
        raise InvalidArgument("the cluster has no free CPU; wait until it has, or start more nodes")
    return min(free, wanted)


class Host:
    """An actor: one shard, and whatever goes wrong in it said in its answer."""

    def __init__(self) -> None:
        import torch

        torch.set_num_threads(1)
        self.shard: Shard | None = None

    def load(self, content: bytes, secrets: Sequence[tuple[str, bool]]) -> bool:
        """Make the shard."""
        plan, inner, parts = parcel.loads(content, secrets)
        self.shard = Shard(plan, inner, parts)
        return True

    def call(self, method: str, common: Any, *arguments: Any) -> tuple[bool, Any]:
        """Return (True, the packed result), or (False, the error)."""
        first = () if common is None else (unpacked(common),)
        return _tried(lambda: packed(getattr(self.shard, method)(*first, *unpacked(arguments))))

    def fold(self, reduce: Reduce | None, before: tuple[bool, Any]) -> tuple[bool, Any]:
        """Return a sum with this shard's uploads added; an error from before is handed on."""
        good, state = before
        if not good or self.shard is None:
            return before
        shard = self.shard
        return _tried(lambda: packed(shard.fold(reduce, unpacked(state))))


def _tried(action: Callable[[], Any]) -> tuple[bool, Any]:
    """Return (True, the result) of an action, or (False, the error)."""
    try:
        return True, action()
    except FedtailorError as error:
        return False, error
    except Exception as error:
        first = "".join(traceback.format_exception_only(error)).strip().splitlines()[0]
        return False, RuntimeError(f"{first} (on a node of the cluster)\n{''.join(traceback.format_exception(error))}")


class Nodes:
    """Shards as actors, spread over the nodes by their CPUs."""

    def __init__(self, session: Session, recipes: Sequence[Recipe]) -> None:
        self.session = session
        self.recipes = [parcel.dumps(recipe, type(recipe[0].algorithm)) for recipe in recipes]
        self.actors: list[Any] = []
        try:
            self.actors = [self._start(home, 1) for home in _homes(len(recipes))]
            self._load(range(len(recipes)))
        except BaseException:
            self.close()
            raise

    @property
    def count(self) -> int:
        return len(self.actors)

    def _start(self, node: str, cpus: int) -> Any:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        home = NodeAffinitySchedulingStrategy(node, soft=True)
        return ray.remote(Host).options(num_cpus=cpus, max_restarts=0, scheduling_strategy=home).remote()

    def _load(self, shards: Sequence[int] | range) -> None:
        """Send shards their clients. The secrets go with the call, which is kept nowhere, not with the rows, which may be."""
        import ray

        refs = []
        for shard in shards:
            content, secrets = self.recipes[shard]
            refs.append(self.actors[shard].load.remote(content, secrets))
        try:
            ray.get(refs, timeout=START)
        except ray.exceptions.GetTimeoutError as error:
            raise InvalidArgument(
                f"the cluster did not start its processes within {START:g} seconds; it may be busy, or use fewer workers="
            ) from error
        except ray.exceptions.RayError as error:
            first = str(error).strip().splitlines()[-1]
            raise WorkerDied(f"a node cannot load its clients ({first}); is the same fedtailor installed there?") from error

    def each(self, method: str, common: Any, calls: Mapping[int, tuple[Any, ...]]) -> tuple[dict[int, Any], list[int]]:
        """Call a method of some shards at once."""
        import ray

        sent = None if common is None else ray.put(packed(common))
        refs = {shard: self.actors[shard].call.remote(method, sent, *packed(own)) for shard, own in calls.items()}
        done, lost = {}, []
        for shard, ref in refs.items():
            try:
                done[shard] = _answer(ray.get(ref))
            except ray.exceptions.RayError:
                lost.append(shard)
        return done, lost

    def chain(self, shards: Sequence[int], reduce: Reduce | None) -> tuple[Any, list[int]]:
        """Hand a sum on from node to node: it does not pass through this process."""
        import ray

        ref: Any = (True, None)
        for shard in shards:
            ref = self.actors[shard].fold.remote(reduce, ref)
        try:
            return _answer(ray.get(ref)), []
        except ray.exceptions.RayError:
            return None, self._dead()

    def _dead(self) -> list[int]:
        import ray

        lost = []
        for shard, actor in enumerate(self.actors):
            try:
                ray.get(actor.__ray_ready__.remote())
            except ray.exceptions.RayError:
                lost.append(shard)
        return lost

    def replace(self, shard: int) -> None:
        import ray

        with suppress(ray.exceptions.RayError):
            ray.kill(self.actors[shard])
        try:
            self.actors[shard] = self._start(_homes(shard + 1)[-1], 0)
            self._load([shard])
        except WorkerDied:  # the node that was to have it is gone as well: asked again, it is found lost, and goes elsewhere
            return

    def close(self) -> None:
        import ray

        for actor in self.actors:
            with suppress(Exception):
                ray.kill(actor)
        self.actors = []
        self.session.close()


class Errands:
    """Whole runs as tasks of the cluster, each in one process; one whose node is lost is done again elsewhere."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self._last: tuple[Any, Any, Any] = (None, None, None)  # rows, the model, and where both lie in the cluster

    def send(self, work: Work, algorithm: Algorithm, federation: Federation, model: Any, options: Options) -> Any:
        """Ask for ``work`` of these; ``result`` waits for it. The rows of successive errands are sent once."""
        import ray

        kind = type(algorithm)
        if self._last[0] is not federation or self._last[1] is not model:
            self._last = (federation, model, ray.put(parcel.dumps((federation, model), kind)[0]))
        job = parcel.dumps((work, algorithm, options), kind)[0]
        return ray.remote(_errand).options(num_cpus=1).remote(self._last[2], job)

    def result(self, errand: Any) -> Any:
        """Return what an errand came to; an error is raised here."""
        import ray

        try:
            good, value = ray.get(errand)
        except ray.exceptions.RayError as error:
            first = str(error).strip().splitlines()[-1]
            raise WorkerDied(f"a run on a node was lost again and again ({first}); is there enough memory?") from error
        if not good:
            raise value
        return value

    def close(self) -> None:
        self.session.close()


def _errand(common: bytes, job: bytes) -> tuple[bool, Any]:
    """Return what a piece of work gives, on rows and a model."""
    import torch

    torch.set_num_threads(1)

    def action() -> Any:
        federation, model = parcel.loads(common, ())
        work, algorithm, options = parcel.loads(job, ())
        with alone():
            return work(algorithm, federation, model, options)

    return _tried(action)


def _answer(said: tuple[bool, Any]) -> Any:
    good, value = said
    if not good:
        raise value
    return unpacked(value)


def _homes(count: int) -> list[str]:
    """Return the nodes of so many shards: neighbours on the ring are on one node, and nodes have shares by their CPUs."""
    import ray

    nodes = sorted((n for n in ray.nodes() if n["Alive"] and n["Resources"].get("CPU", 0) >= 1), key=lambda n: n["NodeID"])
    if not nodes:
        raise WorkerDied("no node of the cluster is left; start it again, and resume the run")
    seats = [node["NodeID"] for node in nodes for _ in range(int(node["Resources"]["CPU"]))]
    return [seats[place * len(seats) // count] for place in range(count)]
