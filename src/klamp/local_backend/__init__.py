"""LocalBackend: train on trajectories of your own making, shaped like ART's; ``docs/local-backend.md`` explains it."""

from __future__ import annotations

from klamp.errors import needing

with needing("klamp.local_backend", "train"):
    from klamp.local_backend.backend import LocalBackend, TrainableModel
    from klamp.local_backend.trajectories import (
        Choice,
        Message,
        Trajectory,
        TrajectoryGroup,
        gather_trajectory_groups,
    )
    from klamp.local_backend.worker import TrainResult

__all__ = [
    "Choice",
    "LocalBackend",
    "Message",
    "TrainResult",
    "TrainableModel",
    "Trajectory",
    "TrajectoryGroup",
    "gather_trajectory_groups",
]
