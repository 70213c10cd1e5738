"""What the policy is held to: which reference (:mod:`.spec`), how its states are computed (:mod:`.states`)."""

from klamp.references.spec import (
    FORMS,
    AdapterPath,
    Base,
    CheckpointStep,
    Ema,
    FrozenModel,
    Periodic,
    ReferenceSpec,
    StepLag,
    parse,
)

__all__ = [
    "FORMS",
    "AdapterPath",
    "Base",
    "CheckpointStep",
    "Ema",
    "FrozenModel",
    "Periodic",
    "ReferenceSpec",
    "StepLag",
    "parse",
]
