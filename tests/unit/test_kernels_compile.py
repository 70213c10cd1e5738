"""The kernels of a decoding step compile for Hopper, with arguments that may be None given and left out.

The interpreter runs what the compiler refuses, and the compiler needs no GPU.
"""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = pytest.mark.slow

HALF = dict.fromkeys(("x_ptr", "w_ptr", "y_ptr", "q_ptr", "k_ptr", "v_ptr", "g_ptr", "u_ptr", "out_ptr"), "*bf16")
HALF |= dict.fromkeys(("q_norm_ptr", "k_norm_ptr", "cos_ptr", "sin_ptr", "keys_ptr", "values_ptr"), "*bf16")
HALF |= dict.fromkeys(("sinks_ptr", "logits_ptr"), "*bf16")
OTHER = {"seen_ptr": "*u8", "live_ptr": "*u8", "column_ptr": "*i64", "seed_ptr": "*i64", "first_ptr": "*i32"}
OTHER |= {"parts_ptr": "*fp32", "token_ptr": "*i64", "logp_ptr": "*fp32"}
FLOATS = dict.fromkeys(("eps", "shift", "scale", "cap", "sign"), "fp32")
HEADS = {"GROUPS": 4, "ROWS": 16, "SIZE": 128, "COLUMNS": 64, "STAGES": 3, "WIDTH": 0}
BARE: dict[str, Any] = {"q_norm_ptr": None, "k_norm_ptr": None}
CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("triton_layers", "_norm", {"ONTO": False, "BLOCK": 1024}),
    ("triton_layers", "_norm", {"ONTO": True, "BLOCK": 1024}),
    ("triton_draw", "_race", {"PARTS": 32, "QUARTER": 1024}),
    ("triton_draw", "_finish", {"PARTS": 32, "BLOCK": 32}),
    ("triton_decode", "_gated", {"GELU": True, "BLOCK": 1024}),
    ("triton_decode", "_attend", {**HEADS, **BARE, "NEXT": 64, "WINDOW": 0, "CAPPED": False, "sinks_ptr": None}),
    ("triton_decode", "_attend", {**HEADS, **BARE, "NEXT": 0, "WINDOW": 128, "CAPPED": True}),
    ("triton_decode", "_attend", {**HEADS, "NEXT": 64, "WINDOW": 128, "CAPPED": False, "sinks_ptr": None}),
    ("triton_layers", "_rotate", {"STEPWISE": True, "SIZE": 64, "HEADS": 16}),
    ("triton_layers", "_gated", {"BLOCK": 4096}),
]


@pytest.mark.parametrize(("module", "name", "fixed"), CASES, ids=lambda x: x if isinstance(x, str) else "")
def test_a_kernel_compiles_for_hopper(module: str, name: str, fixed: dict[str, Any]) -> None:
    pytest.importorskip("triton")
    import importlib

    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = getattr(importlib.import_module(f"klamp.kernels.{module}"), name)
    known = HALF | OTHER | FLOATS
    signature = {arg: "constexpr" if arg in fixed else known.get(arg, "i32") for arg in kernel.arg_names}
    constants = {(kernel.arg_names.index(arg),): value for arg, value in fixed.items()}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    assert ".target sm_90" in made.asm["ptx"]
