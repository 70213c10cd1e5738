"""klamp inside TRL 1.16: steer ``trainer.beta`` so that KL stays at its target, and stop an update that goes too far.

    from klamp.integrations.trl import KLControl

    trainer = GRPOTrainer(model, ..., callbacks=[KLControl(target=0.05, per="token")])
    trainer.train()

:class:`KLControl` works with stock ``GRPOTrainer`` and ``RLOOTrainer``; :class:`KlampGRPOTrainer` is the same trainer
with the exact KL and klamp's placements in its loss.
"""

from klamp.errors import needing

with needing("klamp.integrations.trl", "trl"):
    from klamp.integrations.trl.callback import KLControl
    from klamp.integrations.trl.trainer import KlampGRPOTrainer

__all__ = ["KLControl", "KlampGRPOTrainer"]
