"""What corrections for another sampler descend, by enumeration."""

from __future__ import annotations

import json

import pytest
import torch

from klamp.audit import samplers as s
from klamp.audit.enumeration import TREE, make
from klamp.cli import main


@pytest.fixture(scope="module")
def found() -> dict[tuple[str, str], s.Corrected]:
    return {(f.sampler, f.correction): f for f in s.audit_samplers(range(4))}


ROUNDS, BEHIND, CUT = s.SAMPLERS


@pytest.mark.parametrize("sampler", [ROUNDS, BEHIND])
def test_whole_sequence_weights_are_unbiased(found: dict[tuple[str, str], s.Corrected], sampler: str) -> None:
    """Reward and price together: the sampler's weights are counted once, or this would not be zero."""
    assert found[sampler, "whole sequence weights"].bias < 1e-9
    assert found[sampler, "k1 in the reward, whole sequence weights"].bias < 1e-9
    assert found[sampler, "none"].bias > 1e-4
    assert found[sampler, "truncate(2)"].bias < found[sampler, "none"].bias or sampler == ROUNDS


def test_a_price_weighted_twice_is_seen(found: dict[tuple[str, str], s.Corrected]) -> None:
    assert found[BEHIND, "price weighted twice"].bias > 1.2 * found[BEHIND, "truncate(2)"].bias


@pytest.mark.parametrize("sampler", [BEHIND, CUT])
def test_left_out_tokens_that_go_free_cost_bias(found: dict[tuple[str, str], s.Corrected], sampler: str) -> None:
    pays, free = (found[sampler, f"mask ratio 1.1{more}"].bias for more in ("", ", left-out tokens free"))
    assert free > 1.3 * pays


def test_what_top_p_never_draws_no_weight_brings_back(found: dict[tuple[str, str], s.Corrected]) -> None:
    assert min(f.bias for f in found.values() if f.sampler == CUT) > 0.05


def test_the_same_sampler_needs_nothing() -> None:
    """On the policy's own samples every correction that leaves nothing out is the true gradient."""
    world = make(0, s.DRIFT)
    for name in ("none", "truncate(2)", "truncate(2) per sequence", "mask tv 0.05", "price weighted twice"):
        bias, cosine, _ = s._read(world, world.table(world.policy), s.CORRECTIONS[name])
        assert bias < 1e-9, name
        assert cosine == pytest.approx(1.0)


def test_a_cut_keeps_a_set_that_holds_its_share() -> None:
    world = make(1, s.DRIFT)
    probability = world.table(world.policy).exp()
    keep = s.nucleus(world)
    held = torch.where(keep, probability, 0.0).sum(-1)
    assert (held >= s.TOP_P - 1e-12).all()
    smallest = torch.where(keep, probability, torch.inf).amin(-1)
    assert (held - smallest < s.TOP_P).all(), "without its least likely token it would hold less"
    assert s.cut(world).exp().sum(-1).allclose(torch.ones(TREE.prefixes, dtype=torch.float64))


def test_the_command_prints_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", "--samplers", "--worlds", "1", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {r["sampler"] for r in rows} == set(s.SAMPLERS)
    assert {"bias", "cosine", "std", "correction"} <= rows[0].keys()
