"""Do the clients form groups far from each other? From the same one exchange as ``heterogeneity`` (MINIMAX section 3.3).

Where clients lie in far-apart groups, R^2 over all of them says "do not learn together" although members of a group should. A
federation without groups, be its clients alike or different, is distinguished from one with groups by simulation: the clients'
fits are drawn again around one center (then two, three, ...), with the scatter seen around it and each client's share of the
noise, and grouped by Ward's method. The number of groups is the first for which no finer grouping of the clients is tighter
than the finer groupings of such draws. One or two far-off clients are not a group, nor are groups that nearly touch.

Distances are in units of the noise: directions that are known badly count for less.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.cluster.hierarchy import cut_tree, ward
from scipy.spatial.distance import pdist

from fedtailor.data import rng
from fedtailor.errors import InvalidArgument
from fedtailor.theory.firth import Numbers
from fedtailor.theory.fits import Summary
from fedtailor.theory.heterogeneity import filled, usable

Labels = NDArray[np.int64]

LEVEL = 0.05
DRAWS = 199
MOST = 10  # groups to look for
REPEATS = 50  # fresh draws of the noise that measure stability
FEWEST = 3  # clients that make a group
FAR = 2.0  # the centers of groups are more than so many times as far apart as members are from their center


@dataclass(frozen=True)
class Clusters:
    """``k`` groups (1: none can be told apart) and the group of each client, 0 to k - 1, the largest group first.

    ``within_r2`` and ``between_r2`` split R^2, noise taken off, into scatter inside groups and that of their centers; ``p`` is
    the chance of a grouping as tight if there were none; ``stability`` the agreement (adjusted Rand index, mean) with groupings
    of the same clients under fresh noise, 1 for k = 1. Clients in ``left_out`` had too little data to look for groups with; they
    are put into the group whose center is nearest.
    """

    k: int
    labels: tuple[int, ...]
    names: tuple[str, ...]
    within_r2: float
    between_r2: float
    p: float
    stability: float
    text: str
    left_out: tuple[str, ...] = ()

    def json(self) -> dict[str, Any]:
        return {
            "k": self.k,
            "labels": dict(zip(self.names, self.labels, strict=True)),
            "within_r2": self.within_r2,
            "between_r2": self.between_r2,
            "p": self.p,
            "stability": self.stability,
            "text": self.text,
            "left_out": list(self.left_out),
        }


def find(received: Sequence[Summary], *, most: int = MOST, seed: int = 0) -> Clusters:
    """Return the groups that the clients' summaries form, at most ``most`` of them."""
    if isinstance(most, bool) or not isinstance(most, int) or most < 1:
        raise InvalidArgument(f"most must be a whole number of groups of at least 1, not {most!r}")
    usable(received)  # refuses what cannot be compared
    received = filled(received)
    used = usable(received)
    generator = rng.generator(seed, "clusters")
    scale = _scale(np.mean([s.covariance for s in used], 0))
    points = np.stack([s.parameters for s in used]) @ scale
    noises = [scale @ s.covariance @ scale for s in used]
    limit = max(1, min(most, len(used) // FEWEST))
    k, p = _count_groups(points, noises, limit, generator)
    labels = _group(points, k)
    centers = np.stack([points[labels == g].mean(0) for g in range(k)])
    within, total = _scatter(used, labels), _scatter(used, np.zeros_like(labels))
    stability = 1.0 if k == 1 else _stability(points, noises, labels, generator)
    return Clusters(
        k=k,
        labels=tuple(int(((s.parameters @ scale - centers) ** 2).sum(1).argmin()) for s in received)
        if len(used) < len(received)
        else tuple(labels.tolist()),
        names=tuple(s.name or str(i) for i, s in enumerate(received)),
        within_r2=max(0.0, within),
        between_r2=max(0.0, total - within) if k > 1 else 0.0,
        p=p,
        stability=stability,
        text=_sentence(k, labels, p, stability, limit),
        left_out=tuple(s.name for s in received if all(s is not other for other in used)),
    )


def _scale(noise: Numbers) -> Numbers:
    """Return the symmetric matrix that divides directions by their noise; those known better than the middle one are taken
    as that, so that their true scatter does not drown what separates groups elsewhere."""
    values, turn = np.linalg.eigh(noise)
    least = max(float(np.median(values)), 1e-9 * float(values[-1]))
    return np.eye(len(noise)) if least <= 0 else (turn / np.sqrt(np.maximum(values, least))) @ turn.T


def _count_groups(points: Numbers, noises: Sequence[Numbers], limit: int, generator: np.random.Generator) -> tuple[int, float]:
    """Return the number of groups and the p-value of there being one."""
    p_of_one = 1.0
    for k in range(1, limit):
        p = _p_value(points, noises, k, limit, generator)
        p_of_one = p if k == 1 else p_of_one
        if p > LEVEL:
            return k, p_of_one
    return limit, p_of_one


def _p_value(points: Numbers, noises: Sequence[Numbers], k: int, limit: int, generator: np.random.Generator) -> float:
    """Return how often draws around k centers group as tightly, into some number of groups above k, as the points do."""
    observed = _tightness(points, k, limit)
    if not observed[1].any():
        return 1.0
    draws = _draws(points, noises, _group(points, k), k, generator)
    tight, allowed = map(np.stack, zip(observed, *(_tightness(sample, k, limit) for sample in draws), strict=True))
    spread = np.maximum(tight[1:].std(0), 1e-12)
    gaps = np.where(allowed, (tight[1:].mean(0) - tight) / spread, -np.inf).max(1)
    return float((1 + (gaps[1:] >= gaps[0]).sum()) / (1 + len(draws)))


def _draws(points: Numbers, noises: Sequence[Numbers], labels: Labels, k: int, generator: np.random.Generator) -> Numbers:
    """Points around the groups' centers, normal, with exactly the covariance of the scatter in the groups: [draws, m, p].

    The scatter is U diag(s) V'. For normal points U is uniform among the orthonormal frames with no mean in any group, whatever
    s and V are, so it is drawn afresh and the rest kept. A client with more noise has larger entries.
    """
    member = np.eye(k)[labels]
    member /= member.sum(0) ** 0.5
    _, sizes, turn = np.linalg.svd(points - member @ (member.T @ points), full_matrices=False)
    nonzero = sizes[: len(points) - k] > 1e-9 * max(float(sizes[0]), np.finfo(float).tiny)
    sizes, turn = sizes[: len(nonzero)][nonzero], turn[: len(nonzero)][nonzero]
    noise = np.array([np.trace(each) for each in noises])
    true_scatter = max(0.0, float((sizes**2).sum()) / (len(points) - k) - float(noise.mean()))
    deviations = np.sqrt(true_scatter + noise + np.finfo(float).tiny)
    normals = generator.normal(size=(DRAWS, len(points), len(sizes))) * deviations[:, None]
    frames = np.linalg.qr(normals - member @ (member.T @ normals))[0]
    return member @ (member.T @ points) + frames * sizes @ turn


def _square_root(covariance: Numbers) -> Numbers:
    values, turn = np.linalg.eigh(covariance)
    return turn * np.sqrt(np.maximum(values, 0.0))


def _tightness(points: Numbers, k: int, limit: int) -> tuple[Numbers, NDArray[np.bool_]]:
    """For k + 1 to ``limit`` groups of Ward's: the log of the scatter in them relative to that in k, and whether they are groups
    as we mean them, of ``FEWEST`` members or more and with all centers ``FAR`` apart."""
    m = len(points)
    tree = ward(points)
    inside = np.concatenate([[0.0], np.cumsum(tree[:, 2] ** 2 / 2)])[::-1]  # [j - 1] for j groups: a merge adds height^2/2
    sums = np.concatenate([points, np.zeros((m - 1, points.shape[1]))])  # of every node's points, and how many they are
    sizes = np.concatenate([np.ones(m), tree[:, 3]])
    ends = np.full(2 * m - 1, m - 1)  # the merge in which a node disappears
    for step, (a, b) in enumerate(tree[:, :2].astype(np.int64)):
        sums[m + step] = sums[a] + sums[b]
        ends[a] = ends[b] = step
    begins = np.concatenate([np.full(m, -1), np.arange(m - 1)])
    floor = 1e-12 * inside[0] + np.finfo(float).tiny
    tight, allowed = [], []
    for j in range(k + 1, limit + 1):
        alive = (begins < m - j) & (ends >= m - j)
        centers = sums[alive] / sizes[alive, None]
        nearest = float(pdist(centers, "sqeuclidean").min())
        tight.append(np.log(inside[j - 1] + floor) - np.log(inside[k - 1] + floor))
        allowed.append(bool(sizes[alive].min() >= FEWEST) and nearest > FAR**2 * inside[j - 1] / (m - j))
    return np.array(tight), np.array(allowed)


def _group(points: Numbers, k: int) -> Labels:
    """Group by Ward's method into k, then move every point to the nearest center until none moves; largest group first."""
    labels = np.zeros(len(points), np.int64) if k == 1 else cut_tree(ward(points), k)[:, 0].astype(np.int64)
    for _ in range(20):
        centers = np.stack([points[labels == g].mean(0) for g in range(k)])
        moved = ((points[:, None] - centers) ** 2).sum(2).argmin(1)
        if (moved == labels).all() or len(np.unique(moved)) < k:
            break
        labels = moved
    order = np.argsort(-np.bincount(labels, minlength=k), kind="stable")
    return np.argsort(order)[labels]


def _scatter(summaries: Sequence[Summary], labels: Labels) -> float:
    """Return the clients' mean squared distance to the center of their group, noise taken off."""
    W, noise = np.stack([s.parameters for s in summaries]), np.array([s.noise for s in summaries])
    out = 0.0
    for g in np.unique(labels):
        members = labels == g
        out += float(((W[members] - W[members].mean(0)) ** 2).sum()) - (1 - 1 / members.sum()) * float(noise[members].sum())
    return out / len(summaries)


def _stability(points: Numbers, noises: Sequence[Numbers], labels: Labels, generator: np.random.Generator) -> float:
    from sklearn.metrics import adjusted_rand_score

    k, p = int(labels.max()) + 1, points.shape[1]
    noise_draws = np.stack([generator.normal(size=(REPEATS, p)) @ _square_root(noise).T for noise in noises], 1)
    return float(np.mean([adjusted_rand_score(labels, _group(points + noise_draw, k)) for noise_draw in noise_draws]))


def _sentence(k: int, labels: Labels, p: float, stability: float, limit: int) -> str:
    if limit < 2:
        return f"{len(labels)} clients are too few to look for groups."
    if k == 1:
        return f"The clients form no groups that can be told apart (p = {p:.2g})."
    sizes = ", ".join(map(str, np.bincount(labels)))
    return f"The clients form {k} groups, of {sizes} clients (p = {p:.2g}; agreement under fresh noise {stability:.2f})."
