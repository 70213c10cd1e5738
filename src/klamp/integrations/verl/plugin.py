"""Importing this module makes ``algorithm.kl_ctrl.type: klamp`` work in verl: its entry point in ``verl.plugins``."""

from __future__ import annotations

import logging

from klamp.integrations.verl import install

try:
    install()
except Exception as error:
    # verl passes over what a plugin raises without a word.
    logging.getLogger("klamp.verl").error(
        "klamp is NOT ACTIVE in verl, and algorithm.kl_ctrl.type=klamp will not work: %s: %s",
        *(type(error).__name__, error),
    )
    raise
