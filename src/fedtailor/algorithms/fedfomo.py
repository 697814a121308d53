"""FedFomo: every client receives some others' models and moves towards those that do better than its own on its own rows.

What it does
    The server keeps everyone's last model. A sampled client i receives ``downloads`` of them, theta_n, weighs them by
    w_n = (L_i(theta_i) - L_i(theta_n)) / ||theta_n - theta_i||, L_i being its validation loss, and moves to
    theta_i + sum_n w+_n (theta_n - theta_i), w+ the positive parts of w scaled to sum to one. Then it trains and sends its model
    and w. The server adds w to row i of an affinity matrix, by which it chooses what to send next time: the highest, or, with
    probability ``explore``, any.
Reference
    Zhang et al. 2021 (Personalized federated learning with first order model optimization), Section 3.
    The first-order weights, their clipping and normalisation, Algorithm 1, and sampling of models by the affinity matrix P.
Differs from the paper
    Only models of clients that took part before are sent, never the client's own; fewer where there are fewer. The coin of
    ``explore`` is thrown once for each client and round and does not decay; equal affinities are ordered at random. Without
    validation rows the loss is on the training rows. The norm is over parameters; buffers are mixed with the same weights.
Limits
    downloads = 0 is Local.
When to use
    When clients form unknown groups and can afford several models down. Others' models reach a client as they are.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from fedtailor import tree
from fedtailor.algorithms.base import Algorithm, Limit, amount, param
from fedtailor.data import rng
from fedtailor.errors import InvalidArgument
from fedtailor.local import descend, scan


@dataclass(frozen=True, kw_only=True)
class FedFomo(Algorithm):
    downloads: int = param(5, ge=0)
    explore: float = param(0.3, ge=0, le=1)

    family = "a model made for each client"
    reduce = "stack"
    limits = (Limit({"downloads": 0}, "Local"),)
    leak = "a client weighs others' models by their loss on its rows"

    def work(self):
        return {**super().work(), **({"look": amount(None, 1)} if self.downloads else {})}

    def init_server(self, task):
        if not self.downloads:
            return {}, {}
        if not task.clients:
            raise InvalidArgument("FedFomo keeps a model of every client, and their number is not known; use ft.run")
        models = tree.map(lambda leaf: leaf.expand(task.clients, *leaf.shape).clone(), task.init())
        like = next(iter(models.values()))
        zeros = like.new_zeros(task.clients)
        return {}, {"models": models, "present": zeros, "affinity": zeros.expand(task.clients, task.clients).clone()}

    def chosen(self, server, clients, rnd):
        """Return (whose models these ranks receive [clients, downloads], 1 where there is such a model); of None, one row."""
        present, affinity = server["present"].cpu().numpy(), server["affinity"].cpu().numpy()
        ranks = np.array([len(present)]) if clients is None else clients.cpu().numpy()
        chance = _uniform(rnd, "model", ranks[:, None], np.arange(len(present)))
        score = np.zeros_like(chance) if clients is None else affinity[ranks]
        score = np.where(_uniform(rnd, "explore", ranks) < self.explore, 0.0, score.T).T
        free = (present > 0) & (np.arange(len(present)) != ranks[:, None])
        best = np.lexsort((-chance, -score, ~free), axis=-1)[:, : min(self.downloads, len(present) - 1)]
        known = np.take_along_axis(free, best, 1)
        return torch.from_numpy(best).to(server["present"].device), torch.from_numpy(known).to(server["present"])

    def downlink(self, task, shared, server, clients, rnd):
        if not self.downloads:
            return {}
        who, known = self.chosen(server, clients, rnd)
        own = {"models": tree.map(lambda leaf: leaf[who], server["models"]), "known": known}
        return tree.map(lambda leaf: leaf[0], own) if clients is None else own

    def init_client(self, task, shared, data):
        return {"model": task.init()}

    def weigh(self, task, theta, shared, data):
        """Return w_n of each model received; zero for one that is not known or the same."""

        def add(total, batch):
            weight = task.weigh(batch)
            rows = torch.tensor(float(len(batch["y"]))) if weight is None else weight.sum()
            return {"loss": total["loss"] + losses(batch) * rows.to(like), "rows": total["rows"] + rows.to(like)}

        def losses(batch):
            return torch.stack([task.mean_loss(task.apply(model, batch["x"]), batch) for model in (theta, *others)])

        others = [tree.map(lambda leaf, n=n: leaf[n], shared["models"]) for n in range(len(shared["known"]))]
        like = shared["known"]
        if "val" in data:
            loss = losses(data["val"])
        else:
            total = scan(add, {"loss": like.new_zeros(len(others) + 1), "rows": like.new_zeros(())}, data["look"])
            loss = total["loss"] / total["rows"]
        apart = torch.stack([tree.dist2(tree.trainable(model), tree.trainable(theta)) for model in others]).sqrt()
        usable = shared["known"] * (apart > 0)
        return usable * (loss[0] - loss[1:]) / torch.where(usable > 0, apart, 1.0)

    def client_update(self, task, shared, personal, data, rnd):
        theta, opt = personal["model"], self.optimizer(rnd)
        if not self.downloads:
            return {}, {"model": descend(task.risk, theta, data, opt)}
        w = self.weigh(task, theta, shared, data)
        gain = w.clamp(min=0)
        share = gain / torch.where(gain.sum() > 0, gain.sum(), 1.0)
        mixed = tree.map(lambda own, them: own + torch.tensordot(share, them - own, 1), theta, shared["models"])
        model = descend(task.risk, mixed, data, opt)
        return {"model": model, "weights": w}, {"model": model}

    def server_update(self, task, shared, server, upload, rnd):
        if not self.downloads:
            return shared, server
        who, _ = self.chosen(server, rnd.ranks, rnd)
        models = tree.map(lambda old, new: old.index_copy(0, rnd.ranks, new), server["models"], upload["model"])
        affinity = server["affinity"].index_put((rnd.ranks[:, None], who), upload["weights"], accumulate=True)
        return shared, {"models": models, "present": server["present"].index_fill(0, rnd.ranks, 1.0), "affinity": affinity}

    def predict(self, task, shared, personal, x):
        return task.apply(personal["model"], x)


def _uniform(rnd, name, *parts):
    """Numbers in [0, 1) from (seed, name, round, ranks)."""
    words = rng.mix(rnd.seed, rng.purpose(f"FedFomo {name}"), rnd.number, *parts)
    return (words >> np.uint64(11)).astype(np.float64) / 2**53
