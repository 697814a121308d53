"""pFedHN: a hypernetwork on the server makes every client's model from an embedding of the client.

What it does
    The server holds an embedding v_i of each client and a network h with parameters phi; client i receives theta_i = h(v_i; phi),
    trains it and sends its change delta_i. The server moves phi by hyper_lr times the weighted mean over the cohort of
    (d theta_i / d phi)' delta_i, and each v_i of the cohort by embedding_lr (d theta_i / d v_i)' delta_i: the chain rule, with
    delta_i in the place of minus the gradient at theta_i. Clients keep nothing; a newcomer receives h at the mean embedding.
Reference
    Shamsian et al. 2021 (Personalized federated learning using hypernetworks), Algorithm 1 and equation (3).
    Embeddings of 1 + n/4 numbers for n clients as in their experiments.
Differs from the paper
    h is a perceptron (``hidden`` ReLU units in each of ``layers`` layers) with one linear output layer for all parameters, whose
    bias starts at the model's start, so that the first models are close to it. A cohort of several clients updates at once; the
    paper samples one. The server steps by plain gradients (the authors use momentum and decay), clients by ``opt`` (the authors
    with momentum). Buffers are averaged as in FedAvg. The sign is that of descent: theta_i moves along delta_i.
Limits
    hidden = 0 leaves only the output's bias: FedAvg with server_lr = hyper_lr.
When to use
    When there are many clients in groups and the server is strong: it holds hidden + 1 times the model, clients nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F

from fedtailor import tree
from fedtailor.algorithms.base import Algorithm, Limit, param
from fedtailor.errors import InvalidArgument
from fedtailor.local import descend


@dataclass(frozen=True, kw_only=True)
class PFedHN(Algorithm):
    hyper_lr: float = param(0.01, gt=0)
    embedding_lr: float | None = param(None, gt=0)  # hyper_lr if not given
    embedding: int | None = param(None, ge=1)  # numbers; 1 + n/4 if not given
    hidden: int = param(100, ge=0)
    layers: int = param(3, ge=1)

    family = "a model made for each client"
    reduce = "stack"
    limits = (Limit({"hidden": 0, "hyper_lr": 1.0}, "FedAvg", exact=False, also={"server_lr": 1.0}),)

    def init_server(self, task):
        if not task.clients:
            raise InvalidArgument("PFedHN keeps an embedding of every client, and their number is not known; use ft.run")
        model = task.init()
        like = next(iter(model.values()))
        draw = torch.Generator().manual_seed(task.seed)

        def normal(*shape):
            return torch.randn(shape, generator=draw, dtype=torch.float64).to(like)

        embeddings = normal(task.clients, self.embedding or 1 + task.clients // 4)
        sizes = [embeddings.shape[1], *[self.hidden] * self.layers]
        net = {}
        for i, (inputs, outputs) in enumerate(pairwise(sizes)):
            net[f"weight {i}"], net[f"bias {i}"] = normal(outputs, inputs) * (2 / max(inputs, 1)) ** 0.5, like.new_zeros(outputs)
        for name, leaf in tree.trainable(model).items():
            net[f"to {name}"] = normal(*leaf.shape, self.hidden) * 0.1 / max(self.hidden, 1) ** 0.5 * leaf.abs().mean()
            net[f"start {name}"] = leaf
        return {}, {"embeddings": embeddings, "net": net, "buffers": tree.drop(model, tree.trainable(model))}

    def made(self, net, embeddings):
        """Return the parameters that the hypernetwork makes of embeddings [clients, numbers]."""
        z = embeddings
        for i in range(self.layers):
            z = F.relu(F.linear(z, net[f"weight {i}"], net[f"bias {i}"]))
        names = [name.removeprefix("start ") for name in net if name.startswith("start ")]
        return {name: torch.tensordot(z, net[f"to {name}"], ([1], [-1])) + net[f"start {name}"] for name in names}

    def downlink(self, task, shared, server, clients, rnd):
        known = server["embeddings"]
        v = known.mean(0, keepdim=True) if clients is None else known[clients]
        rows = [self.made(server["net"], row) for row in v.split(1)]  # one by one: no bit depends on who else is asked
        parts = {name: torch.cat([row[name] for row in rows]) for name in rows[0]}
        wide = {name: leaf.expand(len(v), *leaf.shape) for name, leaf in server["buffers"].items()}
        model = {name: parts[name] if name in parts else wide[name] for name in task.names}
        return {"model": tree.map(lambda leaf: leaf[0], model) if clients is None else model}

    def client_update(self, task, shared, personal, data, rnd):
        model = descend(task.risk, shared["model"], data, self.optimizer(rnd))
        return {"delta": tree.sub(model, shared["model"])}, personal

    def server_update(self, task, shared, server, upload, rnd):
        delta, mean = upload["delta"], {k: torch.tensordot(rnd.weights.to(leaf), leaf, 1) for k, leaf in upload["delta"].items()}
        v = server["embeddings"][rnd.ranks]
        pull = torch.func.vjp(self.made, server["net"], v)[1]

        def weighed(leaf):
            return leaf * rnd.weights.to(leaf).view(-1, *[1] * (leaf.dim() - 1))

        to_net, _ = pull(tree.map(weighed, tree.trainable(delta)))
        _, to_v = pull(tree.trainable(delta))
        moved = v + (self.embedding_lr or self.hyper_lr) * to_v
        return shared, {
            "embeddings": server["embeddings"].index_copy(0, rnd.ranks, moved),
            "net": tree.add(server["net"], to_net, self.hyper_lr),
            "buffers": tree.add(server["buffers"], tree.pick(mean, server["buffers"])),
        }

    def predict(self, task, shared, personal, x):
        return task.apply(shared["model"], x)
