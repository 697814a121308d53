"""Privacy of whole clients in a run: who can have it, how much noise, and what it comes to.

Covered is that a client takes part at all, with all its rows, in what the server makes of uploads: every round's shared model.
Not covered is what a client keeps and what it measures on its own rows; who keeps the uploads until they are summed is trusted.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fedtailor.algorithms.base import Algorithm
from fedtailor.algorithms.settings import spec, written
from fedtailor.data.secret import Secret
from fedtailor.engine.base import Plan
from fedtailor.engine.options import Options
from fedtailor.errors import InvalidArgument
from fedtailor.privacy.accountant import Spend, delta_of, epsilon, noise_for
from fedtailor.server.crowd import Crowd
from fedtailor.server.reduce import Mean


def crowd_of(options: Options, algorithm: Algorithm, clients: int, size: int, secret: Secret) -> Crowd | None:
    """Return how whole clients are hidden in a run, or None where that was not asked for."""
    clip, noise, target = options.user_clip, options.user_noise, options.user_target_epsilon
    if clip is None:
        if noise is not None or target is not None or options.user_delta is not None or options.user_seed is not None:
            raise InvalidArgument("privacy of whole clients clips their uploads; give user_clip as well")
        return None
    if (noise is None) == (target is None):
        raise InvalidArgument("give user_noise or user_target_epsilon, one of them, beside user_clip")
    if options.weights != "uniform":
        raise InvalidArgument("weights by rows give a large client away; use weights='uniform' with user_clip")
    delta = _delta(options, clients)
    if delta * clients >= 1:
        raise InvalidArgument(
            f"user_delta={delta:g} allows one of the {clients} clients to be published; give less than 1/{clients}"
        )
    share = size / clients
    if noise is None:
        assert target is not None
        noise = noise_for(target, [_spends(algorithm, options.rounds, share)], [delta])
    key = secret if options.user_seed is None else Secret.from_seed(options.user_seed)
    return Crowd(clip, noise, share, clients, key.bound("clients", spec(algorithm), written(algorithm)))


def check_crowd(plan: Plan) -> None:
    """Refuse methods whose server sees more of the uploads than their mean."""
    if plan.crowd is None:
        return
    shared, _ = plan.algorithm.init_server(plan.task)
    reducer = plan.algorithm.reducer(plan.task, shared, plan.round(0, 1, np.arange(len(plan.federation))))
    if type(reducer) is not Mean:
        raise InvalidArgument(
            f"{type(plan.algorithm).__name__} cannot hide whole clients: its server needs more of the uploads than their mean; "
            "use a method that averages (fedtailor list algorithms), or leave user_clip out"
        )


def crowd_spent(plan: Plan, options: Options) -> dict[str, Any]:
    """Return what the summary says of the privacy of whole clients; nothing where they have none."""
    crowd = plan.crowd
    if crowd is None:
        return {}
    spends, noise, delta = crowd_releases(plan, options)
    return {
        "user_epsilon": epsilon(spends, noise, delta),
        "user_delta": delta,
        "user_noise": crowd.noise,
        "user_clip": crowd.clip,
        "user_noise_secret": not crowd.secret.known,
    }


def crowd_releases(plan: Plan, options: Options) -> tuple[list[Spend], float, float]:
    """Return what a run releases of a client, the noise on it, and delta."""
    assert plan.crowd is not None
    return _spends(plan.algorithm, options.rounds, plan.crowd.share), plan.crowd.noise, _delta(options, plan.crowd.clients)


def _spends(algorithm: Algorithm, rounds: int, share: float) -> list[Spend]:
    """Return what a client releases: it is in a round with probability ``share``, in a roll call for sure."""
    calls = min(rounds, int(algorithm.roll_call))
    spends = [Spend(1.0, calls, algorithm.exchanges), Spend(share, rounds - calls, algorithm.exchanges)]
    return [spend for spend in spends if spend.steps]


def _delta(options: Options, clients: int) -> float:
    return delta_of(clients) if options.user_delta is None else options.user_delta
