"""GIANT: Wang, Roosta-Khorasani, Xu and Mahoney (2018), "globally improved approximate Newton", Algorithm 1.

A round has two exchanges. First every client of the round sends the gradient g_i = grad f_i(w) of its whole risk and the server
forms g = sum p_i g_i. Then it sends g; client i answers with the direction H_i^-1 g of its own Hessian H_i = hess f_i(w) (which
with the l2 term of its objective is positive definite), and the server takes
    w <- w - step sum p_i H_i^-1 g.
p_i are the weights of the round's clients, normalised. The paper has everybody in every round, equal parts of one data set
(p_i = 1/m). ``step`` is fixed; without one it is searched for: the largest of 1, 1/4, ..., 4^-9 with
    f(w - step d) <= f(w) - 0.1 step <d, g>,    d = sum p_i H_i^-1 g,    f = sum p_i f_i
(the paper's backtracking; the last if none is that low, of which it says nothing), ``risk`` being f_i. Directions are exact
(`numpy.linalg.solve`); with ``cg`` they are that many steps of conjugate gradients on H_i d = g from d = 0, as in the paper's
Section 3.
``decay`` is gamma of the objective f_i(w) + gamma/2 |w|^2; it is in g_i and in H_i. hessian(w, X, y) is without it, and so is
risk(w, X, y).
"""

import numpy as np

import fedtailor as ft
from tests.oracles import harness
from tests.oracles.harness import FULL_AND_BATCHES, REGRESSION, SOFTMAX, Case, Setting, close, flat


def run(grad, clients, start, *, rounds, batches, cohorts, weights, hessian, step=None, risk=None, decay=0.0, cg=None):
    w = np.array(start, dtype=float)
    history = []
    for t in range(rounds):
        cohort = cohorts(t)
        p = {i: weights[i] / sum(weights[j] for j in cohort) for i in cohort}
        g = sum(p[i] * (grad(w, *clients[i]) + decay * w) for i in cohort)
        move = np.zeros_like(w)
        for i in cohort:
            H = hessian(w, *clients[i]) + decay * np.eye(len(w))
            move = move + p[i] * (np.linalg.solve(H, g) if cg is None else conjugate_gradients(H, g, cg))

        def objective(v, p=p):
            return sum(share * risk(v, *clients[i]) for i, share in p.items()) + decay / 2 * (v @ v)

        taken = searched(objective, w, move, g) if step is None else step
        w = w - taken * move
        history.append({"shared": w.copy(), "personal": [w.copy() for _ in clients], "gradient": g, "step": taken})
    return history


def searched(objective, w, d, g):
    """The backtracking line search."""
    here = objective(w)
    for step in (4.0**-k for k in range(10)):
        if objective(w - step * d) <= here - 0.1 * step * (d @ g):
            break
    return step


def conjugate_gradients(H, b, steps):
    """Hestenes and Stiefel, from zero."""
    d = np.zeros_like(b)
    r = b.copy()
    s = r.copy()
    for _ in range(steps):
        if not r @ r > 0:
            break
        along = H @ s
        a = (r @ r) / (s @ along)
        d, new = d + a * s, r - a * along
        s = new + (new @ new) / (r @ r) * s
        r = new
    return d


def least_squares_hessian(w, X, y):
    return X.T @ X / len(y)


def softmax_hessian(w, X, y):
    """Of the mean cross-entropy of logits X W^T, w holding W row by row: mean_r (diag(q_r) - q_r q_r^T) kron x_r x_r^T."""
    n, d = X.shape
    logits = X @ w.reshape(-1, d).T
    q = np.exp(logits - logits.max(axis=1, keepdims=True))
    q = q / q.sum(axis=1, keepdims=True)
    return sum(np.kron(np.diag(a) - np.outer(a, a), np.outer(x, x)) for a, x in zip(q, X, strict=True)) / n


def least_squares_risk(w, X, y):
    return ((X @ w - y) ** 2).mean() / 2


def softmax_risk(w, X, y):
    z = X @ w.reshape(-1, X.shape[1]).T
    shifted = z - z.max(axis=1, keepdims=True)
    return np.mean(np.log(np.exp(shifted).sum(axis=1)) - shifted[np.arange(len(y)), y])


KINDS = {
    "regression": (REGRESSION, {"hessian": least_squares_hessian, "risk": least_squares_risk}),
    "softmax": (SOFTMAX, {"hessian": softmax_hessian, "risk": softmax_risk}),
}
# ten steps of conjugate gradients solve three equations, or nine, up to rounding
HOW = {
    "solved": ({"lr": 0.7, "cg_steps": 10}, {"step": 0.7}),
    "two steps": ({"lr": 0.5, "cg_steps": 2}, {"step": 0.5, "cg": 2}),
    "searched": ({"line_search": True, "cg_steps": 3}, {"cg": 3}),
}
SETTINGS = (*FULL_AND_BATCHES, Setting(4, 4, "size"))


def case(kind, how):
    problem, functions = KINDS[kind]
    fields, told = HOW[how]
    method = ft.GIANT(**fields, ridge=0.05)
    return Case(method, {**functions, **told, "decay": 0.05}, f"{kind}, {how}", SETTINGS, problem, one_model=True)


def damped(w, X, y):
    return softmax_hessian(w, X, y) + 0.4 * np.eye(len(w))


CASES = (
    *(case(kind, how) for kind in KINDS for how in HOW),
    Case(
        ft.GIANT(lr=0.5, cg_steps=3, ridge=0.05, damping=0.4),
        {"hessian": damped, "step": 0.5, "cg": 3, "decay": 0.05},
        "softmax, damped",
        SETTINGS,
        SOFTMAX,
        one_model=True,
    ),
)


def agree(trial, seen, entry):
    """And the gradient that the server sent down."""
    harness.agree(trial, seen, entry)
    close(flat(seen.shared["gradient"]), entry["gradient"], trial, "the gradient", seen)


def afterwards(trial, history):
    harness.learned(trial, history)
    if trial.case.label == "softmax, searched":
        assert {entry["step"] for entry in history} == {1.0, 0.25}
