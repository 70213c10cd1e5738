"""The parts of :mod:`klamp.local_backend`: what was said, its tokens, a step's settings, the model in memory."""
