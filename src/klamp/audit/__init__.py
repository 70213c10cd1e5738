"""``klamp audit``: enumerate a small policy and say what a KL term descends, how biased and how noisy it is."""

from klamp.audit.enumeration import DRIFTS, Finding, examine, read
from klamp.audit.matrix import Verdict, audit_function, audit_matrix, load_function, render, verdict

__all__ = [
    "DRIFTS",
    "Finding",
    "Verdict",
    "audit_function",
    "audit_matrix",
    "examine",
    "load_function",
    "read",
    "render",
    "verdict",
]
