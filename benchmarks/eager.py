"""Eager exact KL beside plain full-logit PyTorch on the CPU: time and peak extra memory, forward and backward.

The work is the gradient of ``-mean(A · logp) + beta · mean(KL)`` with respect to hidden states (and the head, where it
trains), from hidden states of policy and reference. Extra memory is the growth of the process's peak resident size over
what the inputs take, read in a process of its own for each line. Times are the least of the repeats in that process, on
the clock and in the processors' own time (threads added up), which a busy machine disturbs less.

    OMP_NUM_THREADS=2 python benchmarks/eager.py

Bound for klamp: 5 buffers of 13 MiB, whatever the number of tokens, beside the gradients themselves (and a float32
sum of the head's gradient where it trains).
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor

BETA = 0.05


def plain(hidden: Tensor, head: Tensor, ref_hidden: Tensor, tokens: Tensor, advantages: Tensor) -> Tensor:
    """Whole logits of both models and autograd."""
    logp = (hidden @ head.T).log_softmax(-1)
    with torch.no_grad():
        ref = (ref_hidden @ head.T).log_softmax(-1)
    kl = (logp.exp() * (logp - ref)).sum(-1)
    return (BETA * kl - advantages * logp.gather(1, tokens[:, None]).squeeze(1)).mean()


def klamp_loss(hidden: Tensor, head: Tensor, ref_hidden: Tensor, tokens: Tensor, advantages: Tensor) -> Tensor:
    """The whole loss in one pass."""
    from klamp import kernels

    return kernels.policy_loss(hidden, head, tokens, advantages, beta=BETA, ref_hidden=ref_hidden).loss


def klamp_stats(hidden: Tensor, head: Tensor, ref_hidden: Tensor, tokens: Tensor, advantages: Tensor) -> Tensor:
    """Statistics for a loss of one's own: the backward pass computes the logits again."""
    from klamp import kernels

    stats = kernels.token_stats(hidden, head, tokens, ref_hidden=ref_hidden)
    assert stats.kl is not None
    return (BETA * stats.kl - advantages * stats.logp).mean()


WAYS: dict[str, Callable[..., Tensor]] = {"plain": plain, "policy_loss": klamp_loss, "token_stats": klamp_stats}


def measure(way: str, tokens: int, hidden: int, vocabulary: int, trains: bool, repeats: int) -> dict[str, float]:
    """Milliseconds and extra MiB of one way, in this process."""
    g = torch.Generator().manual_seed(0)
    head = torch.randn(vocabulary, hidden, generator=g).mul_(2 / hidden**0.5).requires_grad_(trains)
    states = torch.randn(tokens, hidden, generator=g).requires_grad_()
    ref = states.detach() + 0.1 * torch.randn(tokens, hidden, generator=g)
    ids = torch.randint(vocabulary, (tokens,), generator=g)
    advantages = torch.randn(tokens, generator=g)
    few = slice(0, 2)
    WAYS[way](states[few], head, ref[few], ids[few], advantages[few]).backward()  # loads libraries and thread pools
    states.grad = head.grad = None
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    times, spent = [], []
    for _ in range(repeats):
        states.grad = head.grad = None
        start, cpu = time.perf_counter(), time.process_time()
        WAYS[way](states, head, ref, ids, advantages).backward()
        times.append(time.perf_counter() - start)
        spent.append(time.process_time() - cpu)
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"ms": 1e3 * min(times), "cpu": 1e3 * min(spent), "mib": (after - before) / 1024}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--hidden", type=int, default=576)
    parser.add_argument("--vocabulary", type=int, default=49152)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--one", choices=list(WAYS), help="measure one way in this process and print JSON")
    parser.add_argument("--trains", action="store_true", help="with --one: the head trains")
    args = parser.parse_args()
    shape = (args.tokens, args.hidden, args.vocabulary)
    if args.one:
        print(json.dumps(measure(args.one, *shape, args.trains, args.repeats)))
        return
    print(
        f"torch {torch.__version__}, {torch.get_num_threads()} threads; {shape[0]} tokens, H {shape[1]}, V {shape[2]}"
    )
    for trains in (False, True):
        print(f"\nhead {'trains' if trains else 'frozen'}: ms, x plain; processor ms, x plain; extra MiB, x plain")
        base: dict[str, float] = {}
        for way in WAYS:
            sizes = ["--tokens", shape[0], "--hidden", shape[1], "--vocabulary", shape[2], "--repeats", args.repeats]
            flags = ["--trains"] if trains else []
            command = [sys.executable, __file__, "--one", way, *map(str, sizes), *flags]
            # Freed blocks go back at once: otherwise the allocator's hoarding counts as memory.
            env = {**os.environ, "MALLOC_TRIM_THRESHOLD_": "0", "MALLOC_MMAP_THRESHOLD_": "1048576"}
            row = json.loads(subprocess.run(command, env=env, check=True, capture_output=True, text=True).stdout)
            base = base or row
            print(
                f"{way:>12} {row['ms']:9.0f} {row['ms'] / base['ms']:6.2f} {row['cpu']:9.0f} "
                f"{row['cpu'] / base['cpu']:6.2f} {row['mib']:9.0f} {row['mib'] / base['mib']:6.2f}"
            )


if __name__ == "__main__":
    main()
