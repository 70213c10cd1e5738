"""``klamp measure``: KL between two models over prompts, exact, with confidence intervals and a map of tokens."""

from klamp.measure.run import Measurement, measure_kl
from klamp.measure.summary import Estimate

__all__ = ["Estimate", "Measurement", "measure_kl"]
