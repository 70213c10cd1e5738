"""The trainer: PPO and GRPO under KL control. Start at :mod:`klamp.train.loop`."""
