"""Exact KL, forward and backward, beside every installed peer and the floor, in one run on one GPU.

The work: from the final hidden states of policy and reference to the gradient of ``-mean(ratio · A) + beta · mean(KL)``
with respect to the hidden states, and to the head where it trains (then the reference has a head of its own).

The floor is the matrix products nobody can avoid (policy logits, reference logits, gradient of the hidden states, and
of the head where it trains), alone, with cuBLAS in 2048-row chunks of bf16, nothing accumulated. Every time is the
median of several, each divided by the floor timed just before and after it, because a GPU's clock moves with its
temperature. Extra memory is the peak of what the work allocates beyond its inputs.

    python benchmarks/fused.py                      # the table of docs/performance.md
    python benchmarks/fused.py --only klamp         # klamp alone
    python benchmarks/fused.py --scaling            # and the cost per token from 2k to 128k tokens

Peers are looked for, not required: torch.compile, trl, liger-kernel, cut-cross-entropy.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from klamp import kernels

SHAPES = {"8B": (8192, 4096, 128256), "0.5B": (16384, 896, 151936), "135M": (16384, 576, 49152)}
BETA = 0.05
GIB = 2**30


@dataclass
class Batch:
    """Inputs of one head."""

    hidden: Tensor
    head: Tensor
    ref_hidden: Tensor
    ref_head: Tensor
    tokens: Tensor
    advantages: Tensor


Step = Callable[[Batch], Tensor]


def batch(shape: tuple[int, int, int], trains: bool) -> Batch:
    """Random states of a policy and of a reference close to it; logits of size 2 to 10."""
    n, h, v = shape
    g = torch.Generator("cuda").manual_seed(0)

    def draw(*size: int) -> Tensor:
        return torch.randn(*size, generator=g, device="cuda")

    hidden = draw(n, h)
    ref = (hidden + 0.1 * draw(n, h)).bfloat16()
    head = (draw(v, h) * (2 / h**0.5)).bfloat16()
    tokens = torch.randint(v, (n,), generator=g, device="cuda")
    ref_head = head.clone() if trains else head
    return Batch(
        hidden.bfloat16().requires_grad_(), head.requires_grad_(trains), ref, ref_head.detach(), tokens, draw(n)
    )


def from_logp(logp: Tensor, ref_logp: Tensor, b: Batch) -> Tensor:
    """The loss with k3, from log-probs."""
    d = logp - ref_logp
    return (BETA * (torch.expm1(-d) + d) - (logp - logp.detach()).exp() * b.advantages).mean()


def klamp_exact(b: Batch) -> Tensor:
    """One pass, exact KL."""
    return kernels.policy_loss(
        b.hidden, b.head, b.tokens, b.advantages, beta=BETA, ref_hidden=b.ref_hidden, ref_head=b.ref_head
    ).loss


def klamp_k3(b: Batch) -> Tensor:
    """k3 at its leanest: the reference's log-probs first, without a gradient, then one pass over the policy."""
    with torch.no_grad():
        ref = kernels.token_stats(b.ref_hidden, b.ref_head, b.tokens).logp
    return kernels.policy_loss(b.hidden, b.head, b.tokens, b.advantages, beta=BETA, form="k3", ref_logp=ref).loss


def klamp_stats(b: Batch) -> Tensor:
    """Exact KL in a loss of one's own: the backward pass computes the logits again."""
    s = kernels.token_stats(b.hidden, b.head, b.tokens, ref_hidden=b.ref_hidden, ref_head=b.ref_head)
    assert s.kl is not None
    return (BETA * s.kl - (s.logp - s.logp.detach()).exp() * b.advantages).mean()


def whole_logits(b: Batch, exact: bool) -> Tensor:
    """Both logits in memory, everything in float32 after them, as in most trainers."""
    logp = torch.nn.functional.linear(b.hidden, b.head).float().log_softmax(-1)
    with torch.no_grad():
        ref = torch.nn.functional.linear(b.ref_hidden, b.ref_head).float().log_softmax(-1)
    at = b.tokens.unsqueeze(1)
    token, ref_token = logp.gather(1, at).squeeze(1), ref.gather(1, at).squeeze(1)
    if not exact:
        return from_logp(token, ref_token, b)
    kl = (logp.exp() * (logp - ref)).sum(-1)
    return (BETA * kl - (token - token.detach()).exp() * b.advantages).mean()


def compiled(exact: bool) -> Step:
    """The same through torch.compile, compiled for each head anew."""
    torch._dynamo.reset()
    return torch.compile(lambda b: whole_logits(b, exact), dynamic=False)


def trl_k3() -> Step:
    """TRL's chunked log-probs with its own chunk."""
    from trl.kernels.chunked_logprob import ChunkedLogProbFunction as logprob

    def step(b: Batch) -> Tensor:
        with torch.no_grad():
            ref = logprob.apply(b.ref_hidden, b.ref_head, None, b.tokens, 1.0, 32768, None, 1.0, ())[0]
        return from_logp(logprob.apply(b.hidden, b.head, None, b.tokens, 1.0, 32768, None, 1.0, ())[0], ref, b)

    return step


def trl_exact() -> Step:
    """TRL's chunked reverse KL (of its distillation trainer) and its chunked log-probs for the policy gradient."""
    from trl.kernels.chunked_divergence import ChunkedDivergenceFunction as divergence
    from trl.kernels.chunked_logprob import ChunkedLogProbFunction as logprob

    def step(b: Batch) -> Tensor:
        kl = divergence.apply(b.hidden, b.head, None, b.ref_hidden, b.ref_head, None, 1.0)[0]
        logp = logprob.apply(b.hidden, b.head, None, b.tokens, 1.0, 32768, None, 1.0, ())[0]
        return (BETA * kl - (logp - logp.detach()).exp() * b.advantages).mean()

    return step


def cce_k3() -> Step:
    """cut-cross-entropy's log-probs."""
    from cut_cross_entropy import linear_cross_entropy

    def step(b: Batch) -> Tensor:
        with torch.no_grad():
            ref = -linear_cross_entropy(b.ref_hidden, b.ref_head, b.tokens, reduction="none")
        return from_logp(-linear_cross_entropy(b.hidden, b.head, b.tokens, reduction="none"), ref, b)

    return step


def liger_k3() -> Step:
    """Liger's fused linear GRPO loss, sequences of 1024 tokens."""
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

    loss = LigerFusedLinearGRPOLoss(beta=BETA, use_ref_model=True, loss_type="bnpo")

    def step(b: Batch) -> Tensor:
        rows = b.tokens.numel() // 1024
        ids = b.tokens.view(rows, 1024)
        each = b.advantages.view(rows, 1024)[:, 0].contiguous()
        hidden, ref = b.hidden.view(rows, 1024, -1), b.ref_hidden.view(rows, 1024, -1)
        return loss(hidden, b.head, ids, torch.ones_like(ids), each, ref_input=ref, ref_weight=b.ref_head)[0]

    return step


PEERS: dict[str, Callable[[], Step]] = {
    "klamp policy_loss, exact": lambda: klamp_exact,
    "klamp policy_loss, k3": lambda: klamp_k3,
    "klamp token_stats, exact": lambda: klamp_stats,
    "plain PyTorch, k3": lambda: lambda b: whole_logits(b, False),
    "plain PyTorch, exact": lambda: lambda b: whole_logits(b, True),
    "TRL chunked, k3": trl_k3,
    "TRL chunked, exact": trl_exact,
    "cut-cross-entropy, k3": cce_k3,
    "torch.compile, k3": lambda: compiled(False),
    "torch.compile, exact": lambda: compiled(True),
    "Liger fused GRPO, k3": liger_k3,
}


def floor(b: Batch, rows: int = 2048) -> Callable[[], None]:
    """The unavoidable matrix products of ``b``, as a function to time."""
    n, v = b.hidden.shape[0], b.head.shape[0]
    rows = min(rows, n)
    hidden, head = b.hidden.detach(), b.head.detach()
    z, zr = hidden.new_empty(rows, v), hidden.new_empty(rows, v)
    g = torch.randn(rows, v, device="cuda", dtype=torch.bfloat16)
    gh = torch.empty_like(hidden)
    gw = torch.empty_like(head) if b.head.requires_grad else None

    def products() -> None:
        for a in range(0, n, rows):
            part = hidden[a : a + rows]
            torch.mm(part, head.t(), out=z[: len(part)])
            torch.mm(b.ref_hidden[a : a + rows], b.ref_head.t(), out=zr[: len(part)])
            torch.mm(g[: len(part)], head, out=gh[a : a + rows])
            if gw is not None:
                torch.mm(g[: len(part)].t(), part, out=gw)

    return products


def milliseconds(run: Callable[[], object], repeats: int) -> float:
    """Median over the repeats, by CUDA events."""
    times = []
    for _ in range(repeats):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop))
    return statistics.median(times)


def measure(step: Step, b: Batch, base: Callable[[], None], repeats: int) -> dict[str, float]:
    """Time over the floor beside it, and the extra memory."""

    def run() -> None:
        b.hidden.grad = b.head.grad = None
        step(b).backward()

    run()
    run()
    b.hidden.grad = b.head.grad = None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    extra = (torch.cuda.max_memory_allocated() - before) / GIB
    base()
    first = milliseconds(base, repeats)
    run()
    own = milliseconds(run, repeats)
    second = milliseconds(base, repeats)
    b.hidden.grad = b.head.grad = None
    return {"ms": own, "floor": (first + second) / 2, "ratio": 2 * own / (first + second), "gib": extra}


def table(name: str, peers: list[str], repeats: int) -> dict[str, dict[str, float]]:
    """Peers on one head, frozen and training, printed as they come."""
    rows: dict[str, dict[str, float]] = {}
    n, h, v = SHAPES[name]
    print(f"\n{name} head: {n} tokens, H {h}, V {v}; x floor (ms), extra GiB", flush=True)
    for trains in (False, True):
        b = batch(SHAPES[name], trains)
        base = floor(b)
        gradient = b.head.numel() * 4 / GIB if trains else 0.0
        for peer in peers:
            label = f"{peer}, head {'trains' if trains else 'frozen'}"
            try:
                row = measure(PEERS[peer](), b, base, max(3, repeats // 2) if "Liger" in peer else repeats)
            except Exception as error:  # a peer that is missing or fails is a line of the table, not its end
                print(f"  {label:<48} not run: {type(error).__name__}: {str(error)[:80]}", flush=True)
                torch.cuda.empty_cache()
                continue
            rows[label] = row
            note = f" ({row['gib'] - gradient:+.2f} beyond the float32 gradient)" if trains else ""
            print(
                f"  {label:<48} {row['ratio']:6.3f}  ({row['ms']:7.2f} / {row['floor']:6.2f})  {row['gib']:6.2f}{note}",
                flush=True,
            )
            torch.cuda.empty_cache()
        del b, base
    return rows


def in_a_row(step: Step, b: Batch, repeats: int, calls: int = 8) -> float:
    """Milliseconds a call of calls that follow one another, as in a training step: Python runs ahead of the GPU."""

    def run() -> None:
        for _ in range(calls):
            b.hidden.grad = b.head.grad = None
            step(b).backward()

    run()
    took = milliseconds(run, repeats) / calls
    b.hidden.grad = b.head.grad = None
    return took


def scaling(repeats: int) -> dict[str, dict[str, float]]:
    """Microseconds a token of klamp's exact loss, head frozen, from 2k to 128k tokens.

    A call by itself starts on an idle GPU, and what Python does before the first product counts. Few tokens are also
    timed in a row of calls, where it does not.
    """
    rows: dict[str, dict[str, float]] = {}
    for name, most in (("135M", 131072), ("0.5B", 131072), ("8B", 32768)):
        _, h, v = SHAPES[name]
        n = 2048
        while n <= most:
            b = batch((n, h, v), False)
            row = measure(klamp_exact, b, floor(b), repeats if n < 65536 else 2)
            row["us"] = 1e3 * row["ms"] / n
            note = ""
            if n < 16384:
                row["us_in_a_row"] = 1e3 * in_a_row(klamp_exact, b, repeats) / n
                note = f"; {row['us_in_a_row']:.3f} us in a row of calls"
            rows[f"{name} {n}"] = row
            print(
                f"  {name:>5} {n:>7} tokens: {row['us']:.3f} us a token, {row['ratio']:.3f} x floor{note}", flush=True
            )
            del b
            n *= 4 if n < 131072 // 4 else 2
    return rows


def main() -> None:
    """Print the tables, and write them where asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="peers whose name contains this")
    parser.add_argument("--shapes", nargs="*", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--scaling", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, kernels: {kernels.backend('cuda')}")
    results: dict[str, dict[str, dict[str, float]]] = {name: {} for name in args.shapes}
    # What compiles for long comes last, so that the first answers come at once.
    for group in (("klamp",), ("plain", "TRL", "cut"), ("torch.compile",), ("Liger",)):
        peers = [p for p in PEERS if p.startswith(group) and args.only in p]
        for name in args.shapes if peers else ():
            results[name] |= table(name, peers, args.repeats)
            if args.json:
                args.json.write_text(json.dumps(results, indent=1))
        if args.scaling and group == ("klamp",):
            print("\ncost per token, head frozen")
            results["scaling"] = scaling(args.repeats)


if __name__ == "__main__":
    main()
