"""klamp inside verl 0.9: ``Hold`` as its controller of the KL penalty, by ``algorithm.kl_ctrl.type: klamp``."""

from klamp.integrations.verl.controller import FILE, HoldKLController, Settings, install

__all__ = ["FILE", "HoldKLController", "Settings", "install"]
