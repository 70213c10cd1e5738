"""klamp: measure, price and steer the KL divergence of a language model in reinforcement learning."""

__version__ = "0.1.0"
