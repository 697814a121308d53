"""Transcriptions against closed forms, against each other where one must become another, and against differences."""

from __future__ import annotations

import numpy as np
import pytest

from tests.oracles import compressed, fedavg, fedfomo, fedpac, fedproto, fedrod, giant, local, networks, pfedhn, risks
from tests.oracles.differences import slope
from tests.oracles.harness import SIZES, D, K, gap
from tests.oracles.harness import rows as clients_of

CLIENTS, SQUARES = clients_of(), clients_of("regression")
UNIFORM = np.full(4, 1 / 4)
TENSORS = (slice(0, K * D), slice(K * D, None))
COHORTS = ([0, 2, 3], [1, 2, 3], [0, 1, 2])


def batches(t, i, phase):
    order = np.random.default_rng([t, i, len(phase)]).permutation(SIZES[i])
    return [order[:4], order[1:5], order[-3:]]


def whole(t, i, phase):
    return [np.arange(SIZES[i])] * 2


def played(transcription, start, grad=risks.softmax_with_bias, clients=CLIENTS, rows=batches, weights=UNIFORM, **told):
    common = {"rounds": len(COHORTS), "batches": rows, "cohorts": COHORTS.__getitem__, "weights": weights}
    return transcription.run(grad, clients, start, **common, **told)


def mlp(seed=0):
    draw = np.random.default_rng(seed)
    sizes = {"0": (5, D), "2": (4, 5), "4": (K, 4)}
    return {
        f"{path}.{leaf}": draw.normal(size=shape if leaf == "weight" else shape[0]) * 0.6
        for path, shape in sizes.items()
        for leaf in ("weight", "bias")
    }


# -- FedROD --------------------------------------------------------------------------------------------------------------
def test_fedrods_balanced_loss_is_plain_where_classes_are_balanced_and_its_heads_stand_still_without_a_rate():
    even = [(x[: 3 * (len(y) // 3)], np.arange(3 * (len(y) // 3)) % 3) for x, y in CLIENTS]
    steps = lambda t, i, phase: [np.arange(len(even[i][1]))] * 2  # noqa: E731
    told = {"grad": networks.gradient, "clients": even, "rows": steps}
    found = played(fedrod, mlp(), **told, lr=0.2, personal_lr=0.0)
    flat = np.concatenate([a.ravel() for a in mlp().values()])
    plain = played(fedavg, flat, **{**told, "grad": flat_gradient}, lr=0.2, server_lr=1.0)
    for ours, theirs in zip(found, plain, strict=True):
        assert gap(np.concatenate([a.ravel() for a in ours["shared"].values()]), theirs["shared"]) < 1e-14
        assert all(
            gap(fedrod.predict(p, even[0][0]), networks.predict(ours["shared"], even[0][0])) == 0 for p in ours["personal"]
        )
    assert gap(plain[-1]["shared"], flat) > 1e-2


def flat_gradient(w, X, y):
    shapes = [(name, a.shape) for name, a in mlp().items()]
    ends = np.cumsum([np.prod(shape) for _, shape in shapes])[:-1]
    model = {name: part.reshape(shape) for (name, shape), part in zip(shapes, np.split(w, ends), strict=True)}
    found, _ = networks.gradient(model, X, y)
    return np.concatenate([found[name].ravel() for name, _ in shapes])


def test_fedrods_steps_by_differences():
    """One client, one step: the balanced loss moves body and generic head, the plain loss of both heads the personal one."""
    X, y = CLIENTS[1]
    draw = np.random.default_rng(1)
    V, c, start, idx = draw.normal(size=(K, 4)), draw.normal(size=K), mlp(), np.array([0, 3, 5, 6, 9])
    counts = np.bincount(y)

    def loss(logits):
        shifted = logits - logits.max(1, keepdims=True)
        return np.mean(np.log(np.exp(shifted).sum(1)) - shifted[np.arange(len(idx)), y[idx]])

    def balanced(model):
        return -np.mean(np.log((q := counts * np.exp(networks.predict(model, X[idx])))[np.arange(len(idx)), y[idx]] / q.sum(1)))

    told = {"rounds": 1, "batches": lambda t, i, p: [idx], "cohorts": lambda t: [1], "weights": UNIFORM}
    end = fedrod.run(networks.gradient, CLIENTS, start, **told, lr=0.3, personal_lr=0.7, first=(V, c))[0]
    by_differences = slope(balanced, start, 1e-5)
    assert gap(end["shared"], {name: start[name] - 0.3 * by_differences[name] for name in start}) < 1e-9
    heads = slope(lambda head: loss(fedrod.predict((start, *head), X[idx])), (V, c), 1e-5)
    assert gap(end["personal"][1][1:], [a - 0.7 * b for a, b in zip((V, c), heads, strict=True)]) < 1e-9
    assert gap(end["personal"][0][1:], (V, c)) == 0
    assert not np.allclose(counts, counts[0])


# -- FedProto and FedPAC ---------------------------------------------------------------------------------------------------
def test_fedproto_without_a_pull_is_local_training_and_its_prototypes_are_class_means():
    found = played(fedproto, mlp(), networks.gradient, lr=0.2, lam=0.0)
    flat = np.concatenate([a.ravel() for a in mlp().values()])
    alone = played(local, flat, flat_gradient, lr=0.2)
    for ours, theirs in zip(found, alone, strict=True):
        assert gap([np.concatenate([a.ravel() for a in w.values()]) for w in ours["personal"]], theirs["personal"]) < 1e-14
    last = found[-1]
    for by, weigh in (("rows", len), ("clients", lambda rows: 1)):
        C = played(fedproto, mlp(), networks.gradient, lr=0.2, lam=0.0, by=by)[-1]["shared"][0]
        for c in range(K):
            z = [fedproto.features(last["personal"][i], CLIENTS[i][0][CLIENTS[i][1] == c]) for i in COHORTS[-1]]
            assert gap(C[c], np.average([rows.mean(0) for rows in z], axis=0, weights=[weigh(rows) for rows in z])) < 1e-14
    assert gap(played(fedproto, mlp(), networks.gradient, lr=0.2, lam=1.0)[-1]["personal"], last["personal"]) > 1e-3


def test_the_pull_to_prototypes_by_differences():
    draw, (X, y) = np.random.default_rng(2), CLIENTS[1]
    C, known, start = draw.normal(size=(K, 4)), np.array([True, False, True]), mlp()

    def apart(model):
        return (((fedproto.features(model, X) - C[y]) * known[y][:, None]) ** 2).mean()

    by_hand, by_differences = fedproto.feature_gradient(start, X, y, C, known), slope(apart, start, 1e-5)
    assert gap(by_hand, {name: by_differences[name] for name in by_hand}) < 1e-8
    assert (
        gap(
            {name: by_differences[name] for name in start if name not in by_hand}, {n: start[n] * 0 for n in start if n[0] == "4"}
        )
        == 0
    )
    assert set(by_hand) == {name for name in start if name[0] != "4"}


def test_fedpacs_combination_is_the_best_of_the_simplex():
    draw = np.random.default_rng(3)
    for _ in range(20):
        A = draw.normal(size=(4, 4))
        P = A @ A.T + 0.01 * np.eye(4)
        best = fedpac.simplex(P)
        assert best.min() >= 0
        assert best.sum() == pytest.approx(1)
        others = draw.dirichlet(np.full(4, 0.5), size=2000)
        assert (np.einsum("ri,ij,rj->r", others, P, others) >= best @ P @ best - 1e-12).all()


def test_fedpacs_clients_with_the_same_rows_share_their_heads_equally_and_strangers_keep_their_own():
    z, y = np.abs(np.random.default_rng(4).normal(size=(30, 4))), np.arange(30) % K
    V, h = fedpac.statistics(z, y, K)
    alike = dict.fromkeys(range(3), V)
    equal = fedpac.simplex(fedpac.quadratic(0, [0, 1, 2], alike, dict.fromkeys(range(3), h)))
    assert gap(equal, np.full(3, 1 / 3)) < 1e-12
    own = fedpac.simplex(fedpac.quadratic(0, [0, 1, 2], alike, {0: h, 1: h + 1e4, 2: h + 2e4}))
    assert own[0] > 1 - 1e-6
    mean = np.stack([(y == c).mean() * z[y == c].mean(0) for c in range(K)])
    assert gap(h, mean) < 1e-14
    # V is the variance of the mean of the one-hot features x_c = 1[y = c] z, summed over classes and features, for n drawn rows
    one_hot = np.concatenate([(y == c)[:, None] * z for c in range(K)], 1)
    assert one_hot.var(axis=0).sum() / len(y) == pytest.approx(V, rel=1e-12)


def test_fedpac_played():
    found = played(fedpac, mlp(), networks.gradient, lr=0.2, personal_lr=0.1, lam=0.5)
    without = played(fedpac, mlp(), networks.gradient, lr=0.2, personal_lr=0.1, lam=0.0)
    assert gap(found[0]["shared"], without[0]["shared"]) == 0  # no centroids in the first round
    assert gap(found[-1]["shared"]["body"], without[-1]["shared"]["body"]) > 1e-3
    heads = [w["4.weight"] for w in found[0]["personal"]]
    assert gap(heads[1], mlp()["4.weight"]) == 0  # not yet sampled
    assert gap(heads[0], heads[2]) > 0


# -- FedFomo ---------------------------------------------------------------------------------------------------------------
def test_fedfomo_goes_where_validation_falls():
    risk = lambda w: float(((w - 1.0) ** 2).sum())  # noqa: E731
    own, worse, better, best = np.zeros(2), -np.ones(2), np.full(2, 0.5), np.ones(2)
    gains = fedfomo.weigh(own, [worse, better, best, own], risk)
    assert gains == pytest.approx([-3 * np.sqrt(2), 1.5 * np.sqrt(2), np.sqrt(2), 0.0])  # from 2 to 8, to 1/2 and to 0
    assert fedfomo.shares(gains) == pytest.approx([0.0, 0.6, 0.4, 0.0])
    assert fedfomo.shares(fedfomo.weigh(best, [own, worse], risk)) == [0.0, 0.0]


def test_fedfomo_sends_the_models_that_did_best_of_those_there_are():
    cohorts, p = ([0, 1, 2], [0, 3]), np.array([0.0, 2.0, -1.0, 3.0])
    chance = lambda t, i: [0.5, 0.1, 0.9, 0.3]  # noqa: E731
    best = fedfomo.sampled(2, 0.3, cohorts.__getitem__, coin=lambda t, i: 0.3, chance=chance)
    assert (best(0, 0, p), best(1, 0, p), best(2, 0, p), best(1, 3, p)) == ([], [1, 2], [3, 1], [1, 0])
    assert fedfomo.sampled(2, 0.3, cohorts.__getitem__, coin=lambda t, i: 0.2, chance=chance)(2, 0, p) == [2, 3]


def test_fedfomo_without_others_is_local_training():
    told = {"lr": 0.2, "risk": risks.cross_entropy, "validation": CLIENTS}
    start = np.zeros(K * D + K)
    alone = played(local, start, lr=0.2)
    found = played(fedfomo, start, **told, downloads=lambda t, i, p: [])
    assert gap([e["personal"] for e in found], [e["personal"] for e in alone]) == 0
    mixing = played(fedfomo, start, **told)
    assert gap(mixing[0]["personal"], alone[0]["personal"]) == 0  # all models are the start
    assert gap(mixing[-1]["personal"], alone[-1]["personal"]) > 1e-3
    assert all(
        sum(share.values()) == pytest.approx(1) or not any(share.values()) for e in mixing for share in e["mixed"].values()
    )


# -- pFedHN ----------------------------------------------------------------------------------------------------------------
def hypernetwork(seed=5):
    draw = np.random.default_rng(seed)
    sizes = ((6, 2), (5, 6), (K * D + K, 5))
    return [(draw.normal(size=s) * 0.5, draw.normal(size=s[0]) * 0.1) for s in sizes], draw.normal(size=(4, 2))


def test_the_hypernetworks_pull_back_by_differences():
    phi, v = hypernetwork()
    d = np.random.default_rng(6).normal(size=K * D + K)
    layers, along = pfedhn.pull_back(phi, v[0], d)
    assert gap(layers, slope(lambda p: pfedhn.forward(p, v[0])[0] @ d, phi, 1e-5)) < 1e-8
    assert gap(along, slope(lambda e: pfedhn.forward(phi, e)[0] @ d, v[0], 1e-5)) < 1e-8


def test_pfedhn_of_one_client_and_a_bias_alone_is_fedavg():
    """A hypernetwork that is its last bias gives every client the same model, which then moves as FedAvg's."""
    size = K * D + K
    phi, v = [(np.zeros((size, 2)), np.zeros(size))], np.zeros((4, 2))
    told = {"lr": 0.2, "server_lr": 0.8}
    found = played(pfedhn, None, **told, embedding_lr=1.0, network=phi, embeddings=v, weights=np.array([0.1, 0.4, 0.2, 0.3]))
    plain = played(fedavg, np.zeros(size), **told, weights=np.array([0.1, 0.4, 0.2, 0.3]))
    assert gap([e["personal"] for e in found], [e["personal"] for e in plain]) < 1e-15
    phi, v = hypernetwork()
    apart = played(pfedhn, None, **told, embedding_lr=0.1, network=phi, embeddings=v)
    assert gap(apart[0]["embeddings"][1], v[1]) == 0  # not sampled
    assert gap(apart[0]["personal"][0], apart[0]["personal"][2]) > 1e-2


# -- GIANT -----------------------------------------------------------------------------------------------------------------
def test_giant_reaches_the_pooled_minimiser_in_one_round_where_hessians_agree():
    x = np.random.default_rng(8).normal(size=(12, D))
    clients = [(x, x @ np.full(D, float(i)) + i) for i in range(4)]
    told = {"rounds": 1, "batches": None, "cohorts": lambda t: range(4), "weights": np.array([0.1, 0.2, 0.3, 0.4])}
    end = giant.run(risks.least_squares, clients, np.ones(D), **told, step=1.0, hessian=giant.least_squares_hessian)[0]["shared"]
    own = [np.linalg.lstsq(x, y)[0] for x, y in clients]
    assert gap(end, told["weights"] @ own) < 1e-12


def test_giant_is_newtons_method_for_one_client_and_its_hessians_are_slopes():
    X, y = CLIENTS[1]
    told = {"rounds": 20, "batches": None, "cohorts": lambda t: [1], "weights": UNIFORM, "step": 1.0, "decay": 0.1}
    end = giant.run(risks.softmax, CLIENTS, np.zeros(K * D), **told, hessian=giant.softmax_hessian)[-1]["shared"]
    assert np.abs(risks.softmax(end, X, y) + 0.1 * end).max() < 1e-12
    w = np.random.default_rng(9).normal(size=K * D)
    by_differences = [slope(lambda w, k=k: risks.softmax(w, X, y)[k], w, 1e-5) for k in range(K * D)]
    assert gap(giant.softmax_hessian(w, X, y), np.array(by_differences)) < 1e-8
    exact = giant.conjugate_gradients(giant.softmax_hessian(w, X, y) + 0.1 * np.eye(K * D), w, K * D)
    assert gap(exact, np.linalg.solve(giant.softmax_hessian(w, X, y) + 0.1 * np.eye(K * D), w)) < 1e-8


def test_giant_played_on_different_clients_falls_to_the_pooled_minimiser():
    told = {"rounds": 40, "batches": None, "cohorts": lambda t: range(4), "weights": UNIFORM, "step": 0.5}
    end = giant.run(risks.least_squares, SQUARES, np.zeros(D), **told, hessian=giant.least_squares_hessian)[-1]
    assert np.abs(sum(risks.least_squares(end["shared"], *c) for c in SQUARES)).max() < 1e-6


# -- compressed uploads ------------------------------------------------------------------------------------------------------
def test_nothing_left_out_is_fedavg():
    told = {"lr": 0.2, "server_lr": 0.8}
    found = played(compressed, np.zeros(K * D + K), **told, compress=compressed.top_k(1.0), tensors=TENSORS)
    assert gap([e["shared"] for e in found], [e["shared"] for e in played(fedavg, np.zeros(K * D + K), **told)]) < 1e-15


def test_top_k_and_eight_bits():
    v = np.array([0.5, -2.0, 2.0, 0.0, 1.0])
    assert compressed.top_k(0.2)(v).tolist() == [0, -2, 0, 0, 0]
    assert compressed.top_k(0.3)(v).tolist() == [0, -2, 2, 0, 0]
    assert compressed.top_k(1e-9)(v).tolist() == [0, -2, 0, 0, 0]
    assert compressed.eight_bits(np.zeros(3)).tolist() == [0, 0, 0]
    q = compressed.eight_bits(v) / (2 / 127)
    assert q == pytest.approx([32, -127, 127, 0, 64])  # 31.75 and 63.5, a tie, to the even one
    assert np.abs(compressed.eight_bits(v) - v).max() <= 1 / 127


@pytest.mark.parametrize("compress", [compressed.top_k(0.25), compressed.eight_bits], ids=["top-k", "8 bits"])
def test_what_is_left_out_is_sent_later(compress):
    """With one client, what was sent plus what is left is the sum of all displacements; without feedback it is not."""
    told = {"rounds": 6, "batches": whole, "cohorts": lambda t: [1], "weights": UNIFORM, "lr": 0.2, "server_lr": 1.0}
    start = np.zeros(K * D + K)
    for feedback in (True, False):
        history = compressed.run(
            risks.softmax_with_bias, CLIENTS, start, **told, compress=compress, tensors=TENSORS, feedback=feedback
        )
        moves, w = np.zeros_like(start), start
        for entry in history:
            y = w
            for idx in whole(0, 1, "train"):
                y = y - 0.2 * risks.softmax_with_bias(y, CLIENTS[1][0][idx], CLIENTS[1][1][idx])
            moves, w = moves + y - w, entry["shared"]
        rest = gap(w + history[-1]["left"][1], moves)
        assert rest < 1e-14 if feedback else rest > 1e-5
