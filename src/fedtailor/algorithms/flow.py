"""Flow: in every layer, every row chooses between the shared weights and the client's own.

What it does
    The server holds a model w and a router psi (``models/router.py``). A client's training rows are two disjoint parts: zeta_l,
    a share ``split`` of them, and zeta_g, the rest; the same in every round unless ``redraw``. A client of a round
      1. phase ``local`` (rows of zeta_l): fine-tunes v from w, ``local_epochs`` or ``local_steps`` of descent on its risk, (1);
      2. phase ``train`` (rows of zeta_g), per batch, from psi and w as received, v fixed: a step on psi of the risk of the
         mixed model minus gamma/L sum_j log q_0^(j), averaged over the rows, (4); then a step on w of the risk of the mixed
         model with the new psi, (5). ``order="router-first"`` takes all steps of the phase on psi, then all on w, over the same
         batches; ``"global-first"`` the other way round;
      3. sends n times the changes of w and of psi, and n = |zeta_g|. v is thrown away: clients keep nothing.
    The server moves by sum n delta / sum n, whatever the run's weights, or lets ``server_opt`` (FedAvgM, FedAdam, FedYogi) step.
    The mixed model is x <- q_0^(j) w^(j)(x) + q_1^(j) v^(j)(x) over the blocks of the task, (3), with q^(j) from the j-th exit of
    the router on the row, (2); or it mixes the outputs of whole models, with ``routing="model"``. Step sizes are ``lr`` for w,
    ``local_lr`` for v, ``router_lr`` for psi (``lr`` if not given); all use ``opt``, each with a memory of its own.
    Of an LSTM the states are mixed, at every position and in every layer (``models/recurrent.py``): there the router has one exit
    and reads [embedding; h_g; c_g; h_v; c_v], L counts the layers, and log q_0 is averaged over the real positions. The embedding
    and the head are w's.
    To predict, a client fine-tunes v on zeta_l (phase ``personalize``, as much as ``local``), then psi on zeta_g (phase
    ``personalize:router``, ``deploy_epochs`` or ``deploy_steps``, as much as ``train`` if not given) with w fixed.
    ``deploy="local"`` leaves psi as received, ``deploy="all"`` trains psi and w as in a round; ``deploy_rows="whole"`` fine-tunes
    v on all rows of the client, which the paper leaves open. Prediction is hard: a row gets every layer's output from the version
    with the larger q, the shared one on a tie, and only that version is run; ``inference="soft"`` mixes. ``warmup`` rounds at the
    start train w alone, as FedAvg on zeta_g; ``global_risk="own"`` steps on w by w's own risk, not the mixed model's. With it
    ``global_rows="whole"`` trains w on all rows of the client, so that w is FedAvg's; psi then has a phase of its own
    (``router``, rows of zeta_g, as much as ``train``), in which it is mixed with w as received, and is weighed by |zeta_g|.
    ``variant="eased"`` is both of these with ``deploy="local"`` and ``deploy_rows="whole"``: w as FedAvg trains it, v as FedAvgFT
    fine-tunes it (by ``local_lr``), and the router as received. ``variant="paper"`` is Eq. (5).
Reference
    FLOW, Equations (1)-(5), Algorithm 1; ``routing="model"`` is its Algorithm 2 (with the regulariser). Variants of section 5.2:
    ``variant="pc"`` (one model, fine-tuned), ``variant="pi"``, ``q0`` (a fixed q_0, no router), ``gamma=0``. The authors'
    published code steps on w by its own risk, not by Eq. (5).
Differs from the paper
    It does not say when the two parts are drawn, nor what a client trains before it predicts (here, as in the authors' code, v
    and psi), nor how PI-Flow's second global path is trained: here the server keeps a second model u, started as w, in v's
    place; phase ``local`` trains it, the client sends its change, weighed by |zeta_l|; nothing is trained to predict. The steps
    alternate batch by batch, not epoch by epoch. Algorithm 2 prints 1/(nM) in the mean; it is 1/n. A client with a single row
    uses it in both parts. Batch norm: see ``routing.py``; its statistics are w's own.
Limits
    variant = "pc" is FedAvgFT under weights by size. q0 = 1 is FedAvg on the rows of zeta_g under weights by their number; so, on
    all rows, with split = "whole", which gives both phases all rows. With global_rows = "whole", and so with variant = "eased",
    the shared model is FedAvg's under weights by size.
When to use
    When some rows of a client follow everybody's law and others its own, the row shows which, and clients have some 60 rows or
    more; and then not as in the paper but with ``variant="eased", inference="soft", redraw=True``. By Eq. (5) w starves: its
    averaged update, projected on that of its own risk, shrinks with q_0 (docs/results/routing.md has the figure), v is soon ahead
    of w, the router turns to v, and w gets still less. So the paper's variant was behind FedAvgFT on every real set tried, and
    in every cell of a map of generated ones. Where the rows do not show which model is right, but the models' confidences do,
    take ``FlowGate``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from fedtailor import tree
from fedtailor.algorithms import routing
from fedtailor.algorithms.base import Algorithm, Limit, amount, param
from fedtailor.algorithms.fedopt import ServerOptimizer
from fedtailor.errors import InvalidArgument
from fedtailor.local import Turn, alternate, descend
from fedtailor.local.schedule import Schedule, at
from fedtailor.models import router
from fedtailor.models.recurrent import recurrent
from fedtailor.task.kinds import PAD
from fedtailor.task.layers import batch_context
from fedtailor.task.parts import joined

AT_THE_END = "personalize:router"
# FLOW Table 4: models w and routers psi (numbers of each) that a client keeps, and that it sends in a round
TABLE_4 = {
    "FedAvgFT": ((1, 0), (1, 0)),
    "Ditto": ((2, 0), (1, 0)),
    "APFL": ((3, 0), (1, 0)),
    "HypCluster": ((2, 0), (1, 0)),
    "Flow": ((2, 1), (1, 1)),
}


_PLAIN = {"global_risk": "mixed", "global_rows": "part", "deploy": "router", "deploy_rows": "part"}
EASED = {"global_risk": "own", "global_rows": "whole", "deploy": "local", "deploy_rows": "whole"}  # what variant="eased" sets


@dataclass(frozen=True, kw_only=True)
class Flow(Algorithm):
    local_steps: int | None = param(None, ge=1)  # on v; as much as on w if neither is given
    local_epochs: int | None = param(None, ge=1)
    local_lr: float | Schedule | None = param(None, gt=0)
    router_lr: float | Schedule | None = param(None, gt=0)
    router_widths: int | Sequence[int] | None = None  # of the base's levels; by the number of inputs if not given
    router_dropout: float = param(0.0, ge=0, lt=1)
    gamma: float = param(1e-3, ge=0)
    split: float | str = param(0.5, gt=0, lt=1)  # share of zeta_l, or "whole"
    redraw: bool = False
    server_lr: float = param(1.0, gt=0)
    server_opt: ServerOptimizer | None = None
    variant: Literal["paper", "eased", "pi", "pc"] = "paper"
    routing: Literal["layer", "model"] = "layer"
    order: Literal["alternate", "router-first", "global-first"] = "alternate"
    q0: float | None = param(None, ge=0, le=1)
    global_risk: Literal["mixed", "own"] = "mixed"
    global_rows: Literal["part", "whole"] = "part"
    warmup: int = param(0, ge=0)  # rounds
    inference: Literal["hard", "soft"] = "hard"
    deploy: Literal["router", "local", "all"] = "router"
    deploy_rows: Literal["part", "whole"] = "part"
    deploy_steps: int | None = param(None, ge=1)
    deploy_epochs: int | None = param(None, ge=1)

    family = "layers chosen for each row"
    reduce = "even"
    reads_rows = True
    words = {"split": "whole"}
    limits = (
        Limit(
            {"variant": "pc", "local_epochs": 1, "local_steps": None, "local_lr": None, "server_opt": None},
            "FedAvgFT",
            exact=False,
        ),
        Limit(
            {"variant": "paper", "q0": 1.0, "split": "whole", "deploy": "router", "global_rows": "part", "server_opt": None},
            "FedAvg",
            exact=False,
        ),
        Limit({"variant": "eased", **_PLAIN, "q0": 0.5, "server_opt": None}, "FedAvg", compares="shared", exact=False),
    )

    def __post_init__(self):
        super().__post_init__()
        if self.server_opt is not None and not isinstance(self.server_opt, ServerOptimizer):
            raise InvalidArgument(f"Flow: server_opt must be a method such as ft.FedYogi(server_lr=0.1), not {self.server_opt!r}")
        if self.server_opt is not None and self.server_lr != 1.0:
            raise InvalidArgument(
                "Flow: give server_lr to the server's method, for instance server_opt=ft.FedYogi(server_lr=0.1)"
            )
        if any(isinstance(width, bool) or not isinstance(width, int) or width < 1 for width in self.levels or ()):
            raise InvalidArgument(f"Flow: router_widths must be whole numbers of at least 1, not {self.router_widths!r}")
        if self.variant == "eased" and (twice := [name for name in EASED if getattr(self, name) != _PLAIN[name]]):
            raise InvalidArgument(f"Flow: variant='eased' sets {', '.join(twice)}; leave that out, or take variant='paper'")
        if self.global_rows == "whole":
            self._check_whole()

    def _check_whole(self):
        if self.global_risk == "mixed":
            raise InvalidArgument(
                "Flow: global_rows='whole' is for global_risk='own': under the mixed risk w would learn beside v on rows that v "
                "has just been fitted to"
            )
        if self.variant in ("pi", "pc") or self.deploy == "all":
            other = "deploy='all'" if self.deploy == "all" else f"variant={self.variant!r}"
            raise InvalidArgument(
                f"Flow: global_rows='whole' trains w apart from the router, which {other} does not; leave one out"
            )

    def how(self, name):
        """Return what holds for one of the settings of ``EASED``: the variant's, or the field."""
        return EASED[name] if self.variant == "eased" else getattr(self, name)

    @property
    def apart(self):
        """Return whether w is trained on all rows, and the router in a phase of its own."""
        return self.how("global_rows") == "whole"

    @property
    def levels(self):
        return (self.router_widths,) if isinstance(self.router_widths, int) else self.router_widths

    @property
    def routed(self):
        """Return whether there is a router to train."""
        return self.q0 is None and self.variant != "pc"

    def stages(self):
        return sorted({0, self.warmup})

    def work(self):
        train = super().work()["train"]
        local = amount(self.local_steps, self.local_epochs, default=train)
        if self.variant == "pc":
            return {"train": train, "personalize": local}
        parts = (None, None) if self.split == "whole" else ((0.0, float(self.split)), (float(self.split), 1.0))
        local, train = (replace(w, part=part, redraw=self.redraw) for w, part in zip((local, train), parts, strict=True))
        if self.variant == "pi":
            return {"train": train, "local": local, "personalize": amount(0, None)}
        deploy = replace(amount(self.deploy_steps, self.deploy_epochs, default=train), part=parts[1], redraw=self.redraw)
        trains_at_end = self.how("deploy") == "all" or (self.how("deploy") == "router" and self.routed)
        last = replace(local, part=None, redraw=False) if self.how("deploy_rows") == "whole" else local
        rounds = {"train": replace(train, part=None, redraw=False) if self.apart else train}
        rounds |= {"router": train} if self.apart and self.routed else {}
        return {**rounds, "local": local, "personalize": last, **({AT_THE_END: deploy} if trains_at_end else {})}

    def init_server(self, task):
        model = task.init()
        shared = {"model": model}
        if self.variant == "pi":
            shared["other"] = model
        if self.variant != "pc" and self.routing == "layer":
            routing.check_blocks(task)
        if self.routed:
            like = next(iter(model.values()))
            states = self.states(task)
            if states is None:
                inputs = routing.need_numbers(task)
                count, each = len(routing.routes(task, self.routing)), inputs.new_ones((1, *inputs.shape[1:])).numel()
            else:
                count, each = 1, states.inputs
            shared["router"] = router.init(each, count, self.levels, seed=task.seed, dtype=like.dtype)
        memory = {} if self.server_opt is None else self.server_opt.init_memory(_trainable(shared))
        return shared, memory

    def client_update(self, task, shared, personal, data, rnd):
        if self.variant == "pc":
            new = {"model": descend(task.risk, shared["model"], data, self.optimizer(rnd))}
            return _upload(shared, new, {"model": data["rows"]}), personal
        params = {name: shared[name] for name in shared if name != "other"}
        counts = dict.fromkeys(params, data["rows"])
        if self.apart and self.routed:
            counts["router"] = data["router"]["rows"]
        if self.variant in ("paper", "eased") and rnd.number < self.warmup:
            new = {**params, "model": descend(task.risk, params["model"], data, self.optimizer(rnd))}
            return _upload(shared, new, counts), personal
        start = shared["other"] if self.variant == "pi" else shared["model"]
        local = descend(task.risk, start, data["local"], self.optimizer(rnd, self.local_lr))
        if self.apart:  # the router is mixed with w as received
            new = self.learn(task, params, local, data["router"], rnd, only=("router",)) if self.routed else params
            new = {**new, "model": descend(task.risk, params["model"], data, self.optimizer(rnd))}
        else:
            new = self.learn(task, params, local, data, rnd)
        if self.variant == "pi":
            new, counts = {**new, "other": local}, {**counts, "other": data["local"]["rows"]}
        return _upload(shared, new, counts), personal

    def learn(self, task, params, local, data, rnd=None, only=("router", "model")):
        """``params`` = {router, model} after alternating steps on those in ``only``, beside the fixed model ``local``."""
        paths, states = routing.routes(task, self.routing), self.states(task)

        def mixed(params: Any, batch: Any) -> tuple[Tensor, Tensor]:
            """Return (risk of the mixed model, scores)."""
            x, key, row = batch["x"], batch["key"], batch.get("row")
            with batch_context(batch.get("mask"), key, row):
                if states is not None:
                    decide = self.decide(params["router"], key, row) if self.routed else self.decide(None, like=local)
                    logits, scores = states(params["model"], local, decide, x, training=True)
                    return task.risk_of(logits, batch, params["model"], {}), scores
                scores = router.scores(params["router"], x, self.router_dropout, key, row) if self.routed else torch.empty(0)
                q = torch.softmax(scores, -1) if self.routed else self.fixed(local, len(paths))
                logits, moved = routing.soft(paths, params["model"], local, q, x, training=True)
            return task.risk_of(logits, batch, params["model"], moved), scores

        def risk(params: Any, batch: Any) -> Tensor:
            return task.risk(params["model"], batch) if self.how("global_risk") == "own" else mixed(params, batch)[0]

        def policy_risk(params: Any, batch: Any) -> Tensor:
            loss, scores = mixed(params, batch)
            minus_log_q0 = -torch.log_softmax(scores, -1)[..., 0].mean(-1)  # [rows], or [rows, positions] of a recurrent model
            if states is not None:
                real = batch["y"] != PAD if batch["y"].dim() == 2 else torch.ones_like(minus_log_q0)
                minus_log_q0 = (minus_log_q0 * real).sum(1) / real.sum(1)
            return loss + self.gamma * task.mean_over(minus_log_q0, batch)

        router_lr = at(self.lr if self.router_lr is None else self.router_lr, rnd.number if rnd else 0)
        opts = {"model": self.optimizer(rnd), "router": self.opt.using(router_lr, None)}
        turns = [Turn("router", policy_risk, opts["router"])] if self.routed and "router" in only else []
        turns += [Turn("model", risk, opts["model"])] if "model" in only else []
        if self.order == "alternate":
            return alternate(turns, params, data, task.channels_last)
        first, second = (turns[:1], turns[1:]) if self.order == "router-first" else (turns[1:], turns[:1])
        params = alternate(first, params, data, task.channels_last)
        return alternate(second, params, data, task.channels_last)

    def server_update(self, task, shared, server, upload, rnd):
        delta = {name: tree.scale(part, 1 / upload["rows"][name]) for name, part in upload["delta"].items()}
        if self.server_opt is None:
            return {name: tree.move(shared[name], delta[name], self.server_lr) for name in shared}, server
        memory, change = self.server_opt.step(server, _trainable(delta))
        return {name: tree.add(shared[name], {**delta[name], **change[name]}) for name in shared}, memory

    def personalize(self, task, shared, personal, data):
        if self.variant == "pi":
            return {"local": shared["other"]}
        local = descend(task.risk, shared["model"], data, self.optimizer(lr=self.local_lr))
        if AT_THE_END not in self.work():
            return {"local": local}
        only = ("router", "model") if self.how("deploy") == "all" else ("router",)
        trained = self.learn(task, shared, local, data[AT_THE_END], only=only)
        return {"local": local, **{name: trained[name] for name in only if name in trained}}

    def predict(self, task, shared, personal, x):
        g = personal.get("model", shared["model"])
        if "local" not in personal or self.variant == "pc":
            return task.apply(personal.get("local", g), x)
        paths, v, states = routing.routes(task, self.routing), personal["local"], self.states(task)
        if states is not None:
            return states(g, v, self._decision(shared, personal), x, hard=self.inference == "hard")[0]
        q = self.routes(task, shared, personal, x)
        if self.inference == "soft":
            return routing.soft(paths, g, v, q, x)[0]
        return routing.hard(paths, g, v, q[..., 0] >= q[..., 1], x)

    def routes(self, task, shared, personal, x):
        """Return q [rows, routes, 2], the probabilities of the global and of the local path with which a client predicts ``x``;
        of a recurrent model, their means over the positions."""
        states = self.states(task)
        if states is not None:
            g, hard = personal.get("model", shared["model"]), self.inference == "hard"
            scores = states(g, personal["local"], self._decision(shared, personal), x, hard=hard)[1]
            return torch.softmax(scores, -1).mean(1)
        if self.routed:
            return router.apply(personal.get("router", shared["router"]), x)
        return self.fixed(shared["model"], len(routing.routes(task, self.routing))).expand(len(x), -1, -1)

    @property
    def diagnostics(self):
        return ("routes",) if self.routed else ()

    def diagnose(self, task, shared, personal, x):
        return {"routes": self.routes(task, shared, personal, x)}

    def condense(self, seen):
        """``routing``: the probability of the shared path by route and by who is right, and what a prediction costs."""
        q = seen.rows["routes"][..., 0]
        spread, blocks = seen.spread(q), [block.name for block in joined(seen.task.blocks)]
        names = blocks if len(blocks) == q.shape[1] else [f"layer {j}" for j in range(1, q.shape[1] + 1)]
        if self.routing == "model":
            names = ["whole model"]
        sizes = {"model_parameters": tree.size(seen.task.init()), "router_parameters": tree.size(seen.shared["router"])}
        to_shared = (q >= 0.5).mean(0).tolist()
        return {"routing": {"clients": seen.clients, "routes": names, **spread, "to_shared": to_shared, **sizes, **seen.work}}

    @classmethod
    def figures(cls, summary):
        """FLOW Figure 2 (box plots of q_0), and Table 4 with the numbers of this model."""
        if not (routing := summary.get("routing")):
            return []
        notes = []
        if routing["multiply_adds_shared"]:
            ratio = routing["multiply_adds_personal"] / routing["multiply_adds_shared"]
            text = "A personal prediction takes {} times the multiply-adds of the shared model alone, with the router's."
            notes.append({"text": text, "values": [ratio]})
        if routing.get("kind_auc"):
            notes.append({"text": "Told by the layers' probability, a row's kind has AUC {}.", "values": routing["kind_auc"]})
        w, psi = routing["model_parameters"], routing["router_parameters"]
        costs = {
            "text": f"Parameters per client by the formulas of Flow's paper, with |w| = {w:,} and a router of |psi| = {psi:,}.",
            "titles": ["kept (Table 4)", "sent (Table 4)"],
            "methods": {name: [_formula(*amount, w, psi) for amount in amounts] for name, amounts in TABLE_4.items()},
        }
        about = "probability of the shared path, layer by layer"
        box = {"of": "routing", "about": about, "middle": "Above one half a row takes the shared layer.", "notes": notes}
        return [{"title": "Which path rows take", "places": routing["routes"], **box, "costs": costs}]

    def states(self, task):
        """Return the recurrent layers whose states are mixed, or None."""
        return recurrent(task) if self.routing == "layer" and self.variant != "pc" else None

    def _decision(self, shared, personal):
        if self.routed:
            return self.decide(personal.get("router", shared["router"]))
        return self.decide(None, like=shared["model"])

    def decide(self, params, key=None, row=None, like=None):
        """Return the router of a recurrent model, from what it reads at a position [rows, inputs] to scores [rows, 2]; without
        ``params``, the scores of a fixed q0."""
        if params is None:
            return lambda inputs: self.fixed(like, 1)[0].log().expand(len(inputs), 2)
        return lambda inputs: router.scores(params, inputs, self.router_dropout, key, row)[:, 0]

    def fixed(self, model, count):
        """Return the q of a fixed q0, [1, routes, 2]."""
        like = next(iter(model.values()))
        q0 = float(self.q0 or 0)
        return torch.tensor([q0, 1 - q0], dtype=like.dtype, device=like.device).expand(1, count, 2)


def _upload(old, new, rows):
    """Return n times the change of every branch, and n: their sums over clients are all the server needs."""
    counts = {name: count.squeeze() for name, count in rows.items()}
    changes = {name: tree.scale(tree.sub(new[name], old[name]), counts[name]) for name in old}
    return {"delta": changes, "rows": {name: counts[name] for name in old}}


def _formula(models, routers, w, psi):
    """[number of parameters, the formula as text]."""
    return [models * w + routers * psi, f"{models if models > 1 else ''}|w|" + (" + |psi|" if routers else "")]


def _trainable(branches):
    return {name: tree.trainable(branch) for name, branch in branches.items()}
