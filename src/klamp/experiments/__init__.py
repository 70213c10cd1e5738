"""Experiments of many runs: ``compare`` (adaptive beside static) and ``sweep`` (a grid), each a folder of run folders.

python -c "from klamp.experiments.commands import CompareConfig, compare; compare(CompareConfig())"
"""
