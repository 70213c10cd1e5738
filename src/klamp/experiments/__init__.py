"""Experiments of many runs: ``compare`` (adaptive, static) and ``sweep`` (a grid), each a folder of run folders."""
