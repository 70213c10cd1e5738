"""Controllers of the price: frozen settings with ``init() -> State`` and a pure ``update(state, kl, n=1) -> State``."""

from klamp.controllers.base import Controller, State, Target
from klamp.controllers.classic import Doubling, Exponential, Fixed, Scheduled, Ziegler
from klamp.controllers.hold import Hold, HoldState
from klamp.controllers.stateful import Stateful

__all__ = [
    "Controller",
    "Doubling",
    "Exponential",
    "Fixed",
    "Hold",
    "HoldState",
    "Scheduled",
    "State",
    "Stateful",
    "Target",
    "Ziegler",
]
