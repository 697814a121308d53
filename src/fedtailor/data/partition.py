"""Rules that deal one data set out to many clients. No client is left empty; the same seed gives the same clients."""

from __future__ import annotations

import heapq

import numpy as np
from numpy.typing import NDArray

from fedtailor.data import rng
from fedtailor.errors import InvalidArgument

Rows = list[NDArray[np.int64]]
RowsByName = dict[str, NDArray[np.int64]]
RULES = "'iid', 'dirichlet:0.3', 'classes:2', 'quantity:0.5', 'natural' or 'domain'"
LARGEST_ALPHA = 1e9  # the shares are equal long before, and sums of gammas overflow long after


def partition(rule: str, y: NDArray[np.int64], clients: int, seed: int, least: int = 1) -> Rows:
    """Return the row numbers of every client; each row is dealt once, and everyone gets at least ``least``.

    ``iid`` deals at random and evenly, ``dirichlet:alpha`` by label shares drawn per class, ``classes:k`` gives every client
    rows of exactly k classes, ``quantity:alpha`` deals at random in sizes drawn from a Dirichlet.
    """
    check_positive_int("clients", clients)
    check_positive_int("min_samples", least)
    if clients * least > len(y):
        raise InvalidArgument(
            f"{clients} clients with at least {least} rows each need {clients * least} rows and there are {len(y)}; "
            f"ask for at most {max(1, len(y) // least)} clients"
        )
    draw = rng.generator(seed, "partition")
    kind, _, option = rule.partition(":")
    if kind == "iid" and not option:
        return [np.sort(part) for part in np.array_split(draw.permutation(len(y)), clients)]
    if kind == "dirichlet":
        return _dirichlet(y, clients, _alpha(rule, option, "dirichlet:0.3"), draw, least)
    if kind == "quantity":
        return _quantity(len(y), clients, _alpha(rule, option, "quantity:0.5"), draw, least)
    if kind == "classes":
        if not option.isdigit() or int(option) < 1:
            raise InvalidArgument(f"cannot read {rule!r}; write for instance 'classes:2' with a whole number from 1")
        return _classes(y, clients, int(option), draw, least)
    raise InvalidArgument(f"unknown partition {rule!r}; use {RULES}")


def natural(owner: NDArray[np.str_], clients: int | None, seed: int, least: int = 1) -> RowsByName:
    """Return the rows of every owner with at least ``least``; with ``clients``, of that many owners drawn with the seed."""
    rows_by_owner = grouped(owner)
    names = choose_owners(list(rows_by_owner), [len(rows) for rows in rows_by_owner.values()], clients, seed, least)
    return {name: rows_by_owner[name] for name in names}


def domains(domain: NDArray[np.str_], clients: int | None, seed: int, least: int = 1) -> RowsByName:
    """Make one client per domain; with ``clients``, that many in all, equally many from each domain, dealt at random."""
    rows_by_domain = grouped(domain)
    count = len(rows_by_domain) if clients is None else clients
    check_positive_int("clients", count)
    per_domain, rest = divmod(count, len(rows_by_domain))
    if rest or not per_domain:
        raise InvalidArgument(
            f"{count} clients do not spread evenly over {len(rows_by_domain)} domains; "
            f"ask for {len(rows_by_domain)}, {2 * len(rows_by_domain)}, {3 * len(rows_by_domain)}, ..."
        )
    parts: RowsByName = {}
    for name, rows in rows_by_domain.items():
        if len(rows) < per_domain * least:
            raise InvalidArgument(
                f"domain {name} has {len(rows)} rows, too few for {per_domain} clients with at least {least}; "
                f"ask for at most {max(1, len(rows) // least) * len(rows_by_domain)} clients or a smaller min_samples"
            )
        order = rng.generator(seed, "partition", rng.purpose(name)).permutation(rows)
        pieces = np.array_split(order, per_domain)
        parts |= {name if per_domain == 1 else f"{name}-{i}": np.sort(piece) for i, piece in enumerate(pieces)}
    return parts


def grouped(labels: NDArray[np.str_]) -> RowsByName:
    """Return the row numbers by label, in the order of the labels."""
    names, group, counts = np.unique(labels, return_inverse=True, return_counts=True)
    pieces = np.split(np.argsort(group, kind="stable"), np.cumsum(counts)[:-1])
    return {str(name): rows for name, rows in zip(names, pieces, strict=True)}


def choose_owners(names: list[str], sizes: list[int], clients: int | None, seed: int, least: int) -> list[str]:
    """Return the owners with enough rows, or ``clients`` of them drawn with the seed; their order is kept."""
    check_positive_int("min_samples", least)
    large = [name for name, size in zip(names, sizes, strict=True) if size >= least]
    if not large:
        raise InvalidArgument(f"no client has {least} rows, the largest has {max(sizes)}; ask for a smaller min_samples")
    if clients is None:
        return large
    check_positive_int("clients", clients)
    if clients > len(large):
        raise InvalidArgument(
            f"there are {len(large)} clients with at least {least} rows, not {clients}; ask for at most {len(large)}"
        )
    chosen = rng.generator(seed, "keep").permutation(len(large))[:clients]
    return [large[i] for i in np.sort(chosen)]


def check_positive_int(name: str, value: int) -> None:
    """Raise ``InvalidArgument`` unless ``value`` is a whole number from 1."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1:
        raise InvalidArgument(f"{name} must be a whole number from 1, not {value!r}")


def _alpha(rule: str, option: str, example: str) -> float:
    try:
        alpha = float(option)
    except ValueError:
        alpha = 0.0
    if not 0 < alpha <= LARGEST_ALPHA:
        raise InvalidArgument(f"cannot read {rule!r}; write for instance {example!r} with a number above 0, up to 1e9")
    return alpha


def _dirichlet(y: NDArray[np.int64], clients: int, alpha: float, draw: np.random.Generator, least: int) -> Rows:
    """Deal each class out by shares ~ Dir(alpha); then fill up the clients with the fewest rows from those with the most."""
    parts: list[list[int]] = [[] for _ in range(clients)]
    for label in np.unique(y):
        rows = draw.permutation(np.flatnonzero(y == label))
        for part, piece in zip(parts, np.split(rows, _cuts(len(rows), clients, alpha, draw)), strict=True):
            part.extend(piece.tolist())
    return _filled(parts, least)


def _quantity(rows: int, clients: int, alpha: float, draw: np.random.Generator, least: int) -> Rows:
    """Cut randomly ordered rows into sizes ~ Dir(alpha); then fill up the smallest clients from the largest."""
    order = draw.permutation(rows)
    return _filled([piece.tolist() for piece in np.split(order, _cuts(rows, clients, alpha, draw))], least)


def _cuts(rows: int, clients: int, alpha: float, draw: np.random.Generator) -> NDArray[np.int64]:
    shares = np.cumsum(draw.dirichlet(np.full(clients, alpha)))[:-1]
    return np.floor(shares * rows + 0.5).astype(np.int64)


def _filled(parts: list[list[int]], least: int) -> Rows:
    """Move rows one by one from the largest client to the smallest until everyone has ``least``."""
    poor = [(len(part), i) for i, part in enumerate(parts)]
    rich = [(-size, i) for size, i in poor]
    heapq.heapify(poor)
    heapq.heapify(rich)
    while poor[0][0] < least:
        size, to = heapq.heappop(poor)
        if size != len(parts[to]):  # it has given or received a row since this entry was written
            continue
        while -rich[0][0] != len(parts[rich[0][1]]):
            heapq.heappop(rich)
        giver = rich[0][1]
        parts[to].append(parts[giver].pop())
        for i in (to, giver):
            heapq.heappush(poor, (len(parts[i]), i))
            heapq.heappush(rich, (-len(parts[i]), i))
    return [np.sort(np.array(part, np.int64)) for part in parts]


def _classes(y: NDArray[np.int64], clients: int, k: int, draw: np.random.Generator, least: int) -> Rows:
    """Client after client takes the k classes held by the fewest so far (ties at random), so that the holders of any two
    classes differ in number by at most one; then each class is shuffled and dealt evenly among its holders."""
    labels = np.unique(y)
    if k > len(labels):
        raise InvalidArgument(f"a client cannot hold {k} classes of {len(labels)}; use 'classes:{len(labels)}' or fewer")
    if clients * k < len(labels):
        raise InvalidArgument(
            f"{clients} clients with {k} of {len(labels)} classes each leave {len(labels) - clients * k} classes to nobody; "
            f"ask for at least {-(-len(labels) // k)} clients or 'classes:{-(-len(labels) // clients)}'"
        )
    holders: list[list[int]] = [[] for _ in labels]
    for client in range(clients):
        holder_counts = np.array([len(owners) for owners in holders])
        for c in np.lexsort((draw.random(len(labels)), holder_counts))[:k]:
            holders[c].append(client)
    parts: list[list[int]] = [[] for _ in range(clients)]
    for label, owners in zip(labels, holders, strict=True):
        rows = draw.permutation(np.flatnonzero(y == label))
        if len(rows) < len(owners):
            raise InvalidArgument(
                f"class {label} has {len(rows)} rows for the {len(owners)} clients that hold it; ask for fewer clients or classes"
            )
        # who gets the odd row is drawn, or the first clients would be the largest in every class
        for client, piece in zip(draw.permutation(owners), np.array_split(rows, len(owners)), strict=True):
            parts[client].extend(piece.tolist())
    small = min(map(len, parts))
    if small < least:
        raise InvalidArgument(
            f"with 'classes:{k}' the smallest of {clients} clients has {small} rows, fewer than {least}; ask for fewer clients"
        )
    return [np.sort(np.array(part, np.int64)) for part in parts]


def split(y: NDArray[np.int64], shares: tuple[float, ...], draw: np.random.Generator) -> Rows:
    """Split rows 0..len(y)-1 by ``shares``, class by class where a class is large enough; no part is left empty."""
    if len(y) < len(shares):
        raise InvalidArgument(f"{len(y)} rows cannot be split in {len(shares)} parts; give the client more rows")
    order = np.concatenate([draw.permutation(np.flatnonzero(y == label)) for label in np.unique(y)])
    # every class is spread evenly over [0, 1): cutting there keeps the classes' shares in every part
    places = np.concatenate([(np.arange(c) + draw.random()) / c for c in np.unique(y, return_counts=True)[1]])
    order = order[np.argsort(places, kind="stable")]
    cuts: list[int] = []
    for i, share in enumerate(np.cumsum(shares)[:-1] / sum(shares)):
        first, last = (cuts[-1] if cuts else 0) + 1, len(y) - len(shares) + i + 1  # one row at least for each part
        cuts.append(min(max(round(share * len(y)), first), last))
    return [np.sort(part) for part in np.split(order, cuts)]
