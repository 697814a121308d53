"""Flow: Panchal et al. (2023), equations (1)-(5) and Algorithms 1 and 2, in plain PyTorch, float64, for an MLP.

A model is a list of (weight, bias) with ReLU in between. The router psi is {"base": [(B, a)], "exit": [(E, e)]}: a chain of
fully connected layers on the flattened input and an exit of two scores [global, local] per routed block.

A round of a client: w_l starts at the received w_g and descends on its own half (1). Then, batch by batch of the other
half, psi steps on the risk of the mixed model minus (gamma/L) sum_j log q0^(j), averaged over the rows (4), and w_g
steps on the risk of the mixed model under that new psi (5); w_l stands still. The server averages both by n = |zeta_g|.
Nothing is kept. Algorithm 2 prints no regulariser and 1/(nM) before the sum: (4) and sum n w / sum n are taken here.

Options, with the same meaning wherever they appear:
  layers  sizes of the routed blocks; None is one block per layer, [len(w)] is Algorithm 2's mixture of whole models
  exits   "post": exits read the base after its ReLU, "pre": before it. A last exit without base layer reads the last h
  mix     "pre": mixed before the ReLU which ends a block, "post": after it
  q0      a number replaces the router, which then does not train
  order   "alternate"; "router-first": all router steps, then all steps of w_g; "global-first": the reverse
  variant "flow"; "pi": w_g is a pair of global models, both trained through the mixture and both averaged;
          "pi-tied": both paths are the model in training; "pi-start": the second path is w_g as it was received
  risk    of w_g: "mixed" is (5); "own" is its own, as in the authors' published code; "apart" is its own on batches of all
          rows, rows_global, while the router has batches of zeta_g, rows_router, and mixes with w_g as it was received
  loss    "ce": mean cross entropy, "half": half the squared error, mean over rows and outputs
"""

import sys
from functools import cache

import numpy as np
import torch

import fedtailor as ft
from fedtailor.algorithms.flow import AT_THE_END
from fedtailor.engine.base import NO_ROUND
from tests.oracles.harness import NETWORKS, SIZES, Case, Setting, Trial, close, gap

RISKS = {
    "ce": lambda out, y: torch.nn.functional.cross_entropy(out, y),
    "half": lambda out, y: ((out - y.reshape(out.shape)) ** 2).mean() / 2,
}


def personalised(w_g, w_l, psi, x, layers=None, q0=None, hard=False, exits="post", mix="pre"):
    """Equation (3): x <- q0 w_g(x) + q1 w_l(x) block by block; `hard` lets each row take the larger, the global one if equal."""
    sizes = blocks(w_g, layers)
    h, at = torch.as_tensor(x), 0
    for j, share in enumerate(shares(psi, x, len(sizes), q0, hard, exits)):
        last = j == len(sizes) - 1
        on_g, on_l = (block(w[at : at + sizes[j]], h, mix == "post" and not last) for w in (w_g, w_l))
        h = share[:, :1] * on_g + share[:, 1:] * on_l
        if not last and mix == "pre":
            h = torch.relu(h)
        at += sizes[j]
    return h


def blocks(w, layers):
    sizes = [1] * len(w) if layers is None else list(layers)
    if sum(sizes) != len(w) or min(sizes) < 1:
        raise ValueError(f"blocks of {sizes} layers do not make a model of {len(w)}")
    return sizes


def block(part, h, relu_at_end):
    """Layers of one path: ReLU between them, and after the last one if asked."""
    h = h.reshape(len(h), -1)
    for k, (weight, bias) in enumerate(part):
        h = h @ weight.T + bias
        if k < len(part) - 1 or relu_at_end:
            h = torch.relu(h)
    return h


def scores(psi, x, exits="post"):
    """What (2) takes the softmax of: [rows, 2] per exit."""
    h, found = torch.as_tensor(x).reshape(len(x), -1), []
    for j, (E, e) in enumerate(psi["exit"]):
        read = h
        if j < len(psi["base"]):
            B, a = psi["base"][j]
            z = h @ B.T + a
            h = torch.relu(z)
            read = z if exits == "pre" else h
        found.append(read @ E.T + e)
    return found


def shares(psi, x, count, q0=None, hard=False, exits="post"):
    """Per block [rows, 2]: equation (2), or the fixed q0; rounded if `hard`."""
    if q0 is not None:
        q = float(q0 >= 0.5) if hard else float(q0)
        return [torch.tensor([[q, 1.0 - q]], dtype=torch.float64).expand(len(x), 2)] * count
    found = scores(psi, x, exits)
    if len(found) != count:
        raise ValueError(f"{len(found)} exits for {count} blocks")
    if hard:
        first = [(s[:, :1] >= s[:, 1:]).double() for s in found]
        return [torch.cat([f, 1 - f], 1) for f in first]
    return [torch.softmax(s, 1) for s in found]


def regulariser(psi, x, gamma, exits="post"):
    """-(gamma/L) sum_j log q0^(j), mean over the rows."""
    logs = torch.stack([torch.log_softmax(s, 1)[:, 0] for s in scores(psi, x, exits)])  # [L, rows]
    return -gamma * logs.mean(0).mean()


def client_round(
    w_g, psi, x, y, rows_local, rows_global, local_lr, router_lr, lr, gamma, *, n=None, order="alternate", variant="flow", **told
):
    """Lines 5-12 of Algorithm 1: (w_g', psi', n). n is |zeta_g|, by default the number of rows that rows_global names."""
    rates = {"local_lr": local_lr, "router_lr": router_lr, "lr": lr}
    w_g, _, psi = train(w_g, psi, x, y, rows_local, rows_global, **rates, gamma=gamma, order=order, variant=variant, **told)
    return w_g, psi, len({int(r) for rows in rows_global for r in rows}) if n is None else n


def train(
    w_g,
    psi,
    x,
    y,
    rows_local,
    rows_global,
    *,
    local_lr,
    router_lr,
    lr,
    gamma,
    q0=None,
    order="alternate",
    variant="flow",
    loss="ce",
    layers=None,
    exits="post",
    mix="pre",
    risk="mixed",
    rows_router=None,
):
    """(w_g, w_l, psi) after the three kinds of steps. rows_router are the router's own batches, else those of w_g."""
    x, y, w_g, psi = as_double(x), as_double(y), each(as_double, w_g), each(as_double, psi)
    cost, received = RISKS[loss], w_g
    w_l = w_g if variant in ("flow", "pi-start") else None  # what was received; nothing changes in place
    if variant == "flow":
        for r in map(index, rows_local):
            w_l = step(w_l, local_lr, lambda w, r=r: cost(block(w, x[r], False), y[r]))

    def paths(g):
        return g if variant == "pi" else (g, g) if variant == "pi-tied" else (g, w_l)

    def mixed(g, p, r):
        return cost(personalised(*paths(g), p, x[r], layers, q0, False, exits, mix), y[r])

    def router(rows):
        nonlocal psi
        r = index(rows)
        if q0 is None:
            beside = received if risk == "apart" else w_g
            psi = step(psi, router_lr, lambda p: mixed(beside, p, r) + regulariser(p, x[r], gamma, exits))

    def shared(rows):
        nonlocal w_g
        r = index(rows)
        w_g = step(w_g, lr, lambda g: mixed(g, psi, r) if risk == "mixed" else cost(block(g, x[r], False), y[r]))

    turns = [(router, rows) for rows in (rows_global if rows_router is None else rows_router)]
    steps = [(shared, rows) for rows in rows_global]
    if risk == "apart":  # neither sees the other's steps
        plan = turns + steps
    elif order == "alternate":
        plan = [one for pair in zip(turns, steps, strict=True) for one in pair]
    else:
        plan = {"router-first": turns + steps, "global-first": steps + turns}[order]
    for move, rows in plan:
        move(rows)
    return w_g, w_l, psi


def server(updates):
    """Line 14 of Algorithm 1 on [(w_g, psi, n)]: both averaged with weights n / sum n; n may be a pair, of w_g and of psi."""
    counts = np.array([n if isinstance(n, tuple) else (n, n) for _, _, n in updates], float)
    of_w, of_psi = (counts / counts.sum(0)).T
    w_g = mean([(w, p) for (w, _, _), p in zip(updates, of_w, strict=True)])
    return w_g, mean([(psi, p) for (_, psi, _), p in zip(updates, of_psi, strict=True)])


def rounds(w_g, psi, clients, cohorts, rows, told, *, sizes=None, adapt=None, phases=("local", "global")):
    """One entry {"w_g", "psi", "n"} per cohort. rows(t, i, phase) gives a client's batches; told goes to client_round.

    sizes(t, i) is |zeta_g| where batches may not show all of it. With adapt every client also deploys after each round,
    on the batches rows(t, i, "deploy-" + phase): entry "personal" holds (w_g, w_l, psi) of each.
    """
    w_g, psi = each(as_double, w_g), each(as_double, psi)
    history = []
    for t, cohort in enumerate(cohorts):
        updates = []
        for i in cohort:
            batches = [rows(t, i, phase) for phase in phases]
            apart = {"rows_router": rows(t, i, "router")} if told.get("risk") == "apart" else {}
            n = None if sizes is None else sizes(t, i)
            updates.append(client_round(w_g, psi, *clients[i], *batches, n=n, **told, **apart))
        w_g, psi = server(updates)
        entry = {"w_g": w_g, "psi": psi, "n": [n for _, _, n in updates]}
        if adapt is not None:
            entry["personal"] = [
                deploy(w_g, psi, x, y, *(rows(t, i, "deploy-" + phase) for phase in phases), **told, adapt=adapt)
                for i, (x, y) in enumerate(clients)
            ]
        history.append(entry)
    return history


def deploy(w_g, psi, x, y, rows_local, rows_global, *, adapt="local", order="alternate", **told):
    """(w_g, w_l, psi) of a client that is about to predict, made from its training rows and thrown away afterwards.

    "local": w_l alone, stages 1-3 of Section 3; "router": then the router's steps, w_g as served; "all": Algorithm 1's
    lines 5-11 to the end, which gives the w_p that the theory speaks of.
    """
    if adapt == "all":
        return train(w_g, psi, x, y, rows_local, rows_global, order=order, **told)
    turns = {"local": [], "router": rows_global}[adapt]
    told = {**told, "rows_router": turns}
    return train(w_g, psi, x, y, rows_local, [], order="router-first", **told)


def predict(model, x, *, hard=True, variant="flow", q0=None, layers=None, exits="post", mix="pre"):
    """Outputs of what `deploy` gave: hard routes by default, ties to the global path."""
    w_g, w_l, psi = model
    pair = w_g if variant == "pi" else (w_g, w_g) if variant == "pi-tied" else (w_g, w_l)
    with torch.no_grad():
        return personalised(*pair, psi, as_double(x), layers, q0, hard, exits, mix)


def step(tree, lr, function):
    """One step of gradient descent on function(tree); leaves it does not read stay."""
    held = [leaf.clone().requires_grad_() for leaf in leaves(tree)]
    slopes = torch.autograd.grad(function(rebuild(tree, held)), held, allow_unused=True)
    moved = [leaf.detach() if s is None else (leaf - lr * s).detach() for leaf, s in zip(held, slopes, strict=True)]
    return rebuild(tree, moved)


def leaves(tree):
    if torch.is_tensor(tree):
        return [tree]
    parts = tree.values() if isinstance(tree, dict) else tree
    return [leaf for part in parts for leaf in leaves(part)]


def rebuild(tree, flat):
    """A tree of this shape from a list of leaves, in the order of `leaves`."""
    return _rebuild(tree, iter(flat))


def _rebuild(tree, flat):
    if torch.is_tensor(tree):
        return next(flat)
    if isinstance(tree, dict):
        return {name: _rebuild(part, flat) for name, part in tree.items()}
    return type(tree)(_rebuild(part, flat) for part in tree)


def mean(weighted):
    """sum_i p_i tree_i of [(tree, p)]."""
    rows = zip(*(leaves(tree) for tree, _ in weighted), strict=True)
    return rebuild(weighted[0][0], [sum(p * leaf for leaf, (_, p) in zip(row, weighted, strict=True)) for row in rows])


def each(function, tree):
    if isinstance(tree, dict):
        return {name: each(function, part) for name, part in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(each(function, part) for part in tree)
    return function(tree)


def as_double(value):
    """A float64 copy of numbers; class labels stay whole."""
    value = torch.as_tensor(value).detach().clone()
    return value.double() if value.is_floating_point() else value.long()


def index(rows):
    return torch.as_tensor(np.asarray(rows, dtype=np.int64))


RATES = {"lr": 0.3, "local_lr": 0.4, "router_lr": 0.5}
PHASE = {"local": "local", "global": "train", "router": "router", "deploy-local": "personalize", "deploy-global": AT_THE_END}
# the run's weights are such that Flow must not look at them
SETTINGS = (
    Setting(None, 4, "size", {"epochs": 2}),
    Setting(3, 3, "uniform", {"epochs": 1}),
    Setting(4, 2, "size", {"epochs": 2}),
)
PROBE = torch.from_numpy(NETWORKS["mlp"].probe)


def case(label="", told=(), settings=SETTINGS[1:2], **options):
    """``told`` goes to the transcription beside the rates and gamma."""
    method = ft.Flow(**{"gamma": 0.05, "local_epochs": 2, **RATES, **options})
    return Case(method, dict(told), label, settings, NETWORKS["mlp"], rounds=3, tolerance=1e-7)


CASES = (
    case(settings=SETTINGS),
    case("no regulariser", gamma=0.0),
    case("strong regulariser", gamma=0.5),
    case("router first", {"order": "router-first"}, order="router-first"),
    case("global first", {"order": "global-first"}, order="global-first"),
    case("fixed q0", {"q0": 0.7}, q0=0.7),
    case("whole models", {"layers": [3]}, routing="model"),
    case("uneven parts", split=0.75),
    case("parts drawn anew", redraw=True),
    case("all rows in both parts", split="whole"),
    case("a level less than routes", router_widths=(5, 4)),
    case("soft inference", inference="soft"),
    case("router as received", deploy="local"),
    case("all adapts", deploy="all"),
    case("all adapts, global first", {"order": "global-first"}, deploy="all", order="global-first"),
    case("own model of all rows at the end", deploy_rows="whole"),
    case("longer at the end", deploy_epochs=3),
    case("w by its own risk", {"risk": "own"}, global_risk="own"),
    case("w by its own risk on all rows", {"risk": "apart"}, SETTINGS, global_risk="own", global_rows="whole"),
    case("eased", {"risk": "apart"}, SETTINGS, variant="eased"),
    case("eased, soft inference, parts drawn anew", {"risk": "apart"}, variant="eased", inference="soft", redraw=True),
    case("pi", settings=SETTINGS[:2], variant="pi"),
)
ADAPT = {"eased": "local"}  # N deploys the router as received


def named(model):
    """[(weight, bias)] of a named MLP."""
    names = sorted({name.rsplit(".", 1)[0] for name in model}, key=int)
    return [(model[f"{name}.weight"], model[f"{name}.bias"]) for name in names]


def chains(router):
    count = {kind: sum(name.startswith(f"{kind}.") for name in router) // 2 for kind in ("base", "exit")}
    return {
        kind: [(router[f"{kind}.{j}.weight"], router[f"{kind}.{j}.bias"]) for j in range(1, n + 1)] for kind, n in count.items()
    }


def begin(trial):
    """The package's first models, which are drawn: by name, as the transcription writes them."""
    shared, _ = trial.plan.algorithm.init_server(trial.plan.task)
    found = {name: named(shared[name]) for name in ("model", "other") if name in shared}
    return {**found, "router": chains(shared["router"]) if "router" in shared else {"base": [], "exit": []}}


def size_of(trial, i, phase="train"):
    """How many rows a client has for a phase."""
    return int(trial.plan.feed.phases[phase].rows(np.array([SIZES[i]]))[0])


def follow(trial):
    method, feed, start = trial.plan.algorithm, trial.plan.feed, begin(trial)
    if method.variant == "pi":
        return follow_pi(trial)

    def batches(t, i, phase):
        name = PHASE[phase]
        return feed.rows(i, NO_ROUND if phase.startswith("deploy-") else t, name) if name in feed.phases else []

    history = rounds(
        start["model"],
        start["router"],
        trial.clients,
        [trial.cohort(t) for t in range(trial.case.rounds)],
        batches,
        {**RATES, "gamma": method.gamma, **trial.case.told},
        sizes=lambda t, i: (size_of(trial, i), size_of(trial, i, "router")) if "router" in feed.phases else size_of(trial, i),
        adapt=ADAPT.get(method.variant, method.deploy),
    )
    how = {name: value for name, value in trial.case.told.items() if name in ("q0", "layers")}
    return [
        {
            "shared": {"model": entry["w_g"], **({"router": entry["psi"]} if method.routed else {})},
            "logits": [predict(model, PROBE, hard=method.inference == "hard", **how) for model in entry["personal"]],
        }
        for entry in history
    ]


def follow_pi(trial):
    """The paper leaves open how pi-Flow trains its second path; this is the docstring's reading, made of the steps above."""
    feed, start, ce = trial.plan.feed, begin(trial), RISKS["ce"]
    g, u, psi = start["model"], start["other"], start["router"]
    history = []
    for t in range(trial.case.rounds):
        sent = []
        for i in trial.cohort(t):
            x, y = map(as_double, trial.clients[i])
            mine, common, router = u, g, psi
            for r in feed.rows(i, t, "local"):
                mine = step(mine, RATES["local_lr"], lambda w, x=x[r], y=y[r]: ce(block(w, x, False), y))
            for r in feed.rows(i, t, "train"):
                xr, yr = x[r], y[r]

                def mixed(w, p, xr=xr, yr=yr, mine=mine):
                    return ce(personalised(w, mine, p, xr), yr)

                router = step(router, RATES["router_lr"], lambda p, w=common, xr=xr: mixed(w, p) + regulariser(p, xr, 0.05))
                common = step(common, RATES["lr"], lambda w, p=router: mixed(w, p))
            sent.append((common, mine, router, size_of(trial, i), size_of(trial, i, "local")))
        here, there = (sum(s[k] for s in sent) for k in (3, 4))
        g, psi = (mean([(s[k], s[3] / here) for s in sent]) for k in (0, 2))
        u = mean([(s[1], s[4] / there) for s in sent])
        history.append({"shared": {"model": g, "other": u, "router": psi}, "logits": [predict((g, u, psi), PROBE)] * len(SIZES)})
    return history


def agree(trial, seen, entry):
    for name, theirs in entry["shared"].items():
        ours = chains(seen.shared[name]) if name == "router" else named(seen.shared[name])
        close(ours, theirs, trial, name, seen)
    for i, theirs in enumerate(entry["logits"]):
        close(seen.logits[i], theirs, trial, f"client {i}", seen)


def afterwards(trial, history):
    start, last = begin(trial), history[-1]["shared"]
    assert gap(start["model"], last["model"]) > 0.05
    if "router" in last:
        assert gap(start["router"], last["router"]) > 0.01
    if "other" in last:
        assert gap(last["model"], last["other"]) > 0.05
    if trial.case.label and trial.setting == SETTINGS[1]:  # two options with the same numbers would be a test of neither
        assert gap(history[-1]["logits"], plain()) > 1e-4


@cache
def plain():
    """What the clients of the plain case predict in the end, in the setting of all others."""
    return Trial(sys.modules[__name__], CASES[0], SETTINGS[1]).follow()[-1]["logits"]
