"""Where completions come from: klamp's own sampler over a merged copy of the policy."""
