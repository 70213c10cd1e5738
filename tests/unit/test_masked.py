"""Reductions: the three units by hand and by loop, and nothing outside the mask in any result or gradient."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

import klamp
from klamp.masked import UNITS, as_mask, select, sum_count

settings.register_profile("steady", deadline=None)  # a busy machine is no failure
settings.load_profile("steady")

POISON = [float("nan"), float("inf"), -float("inf")]


@st.composite
def batches(draw: st.DrawFn) -> tuple[Tensor, Tensor]:
    b, t = draw(st.integers(1, 5)), draw(st.integers(1, 6))
    values = draw(st.lists(st.floats(-5, 5), min_size=b * t, max_size=b * t))
    mask = draw(st.lists(st.booleans(), min_size=b * t, max_size=b * t))
    return torch.tensor(values, dtype=torch.float64).view(b, t), torch.tensor(mask).view(b, t)


def by_loop(x: Tensor, mask: Tensor, per: str, count_empty: bool) -> float:
    lists = [row[keep].tolist() for row, keep in zip(x, mask, strict=True)]
    if per == "token":
        flat = [v for row in lists for v in row]
        return sum(flat) / len(flat) if flat else 0.0
    rows = [row for row in lists if row or count_empty]
    each = [sum(row) if per == "sequence" else sum(row) / max(len(row), 1) for row in rows]
    return sum(each) / len(each) if each else 0.0


@given(batches(), st.sampled_from(UNITS), st.booleans())
def test_every_unit_is_its_definition(batch: tuple[Tensor, Tensor], per: str, count_empty: bool) -> None:
    x, mask = batch
    got = klamp.mean(x, mask, per, count_empty).item()  # type: ignore[arg-type]
    assert got == pytest.approx(by_loop(x, mask, per, count_empty), rel=1e-9, abs=1e-12)


@given(batches(), st.sampled_from(UNITS), st.data())
def test_padding_permutation_and_split_change_nothing(
    batch: tuple[Tensor, Tensor], per: str, data: st.DataObject
) -> None:
    x, mask = batch
    total, count = sum_count(x, mask, per=per)  # type: ignore[arg-type]
    right = data.draw(st.integers(0, 3))
    pad = torch.full((x.shape[0], right), data.draw(st.sampled_from(POISON)), dtype=x.dtype)
    padded = sum_count(torch.cat([x, pad], 1), torch.cat([mask, pad == 0], 1), per=per)  # type: ignore[arg-type]
    order = torch.tensor(data.draw(st.permutations(range(x.shape[0]))))
    permuted = sum_count(x[order], mask[order], per=per)  # type: ignore[arg-type]
    cut = data.draw(st.integers(0, x.shape[0]))
    parts = [sum_count(x[s], mask[s], per=per) for s in (slice(0, cut), slice(cut, None))]  # type: ignore[arg-type]
    split = (parts[0][0] + parts[1][0], parts[0][1] + parts[1][1])
    for other_total, other_count in (padded, permuted, split):
        assert torch.allclose(other_total, total, rtol=1e-9, atol=1e-12)
        assert other_count == count


@given(batches(), st.sampled_from(UNITS), st.sampled_from(POISON))
def test_nothing_outside_the_mask_reaches_a_value_or_a_gradient(
    batch: tuple[Tensor, Tensor], per: str, poison: float
) -> None:
    x, mask = batch
    results = []
    for fill in (0.0, poison):
        leaf = x.masked_fill(~mask, fill).requires_grad_()
        value = klamp.mean(leaf, mask, per)  # type: ignore[arg-type]
        value.backward()
        results.append((value.detach(), leaf.grad))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])
    assert (results[1][1][~mask] == 0).all()


def test_the_three_units_on_an_example() -> None:
    kl = torch.tensor([[0.5, 0.5, 9.0, 9.0], [0.1, 0.1, 0.1, 0.1], [9.0, 9.0, 9.0, 9.0]])
    mask = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0]])
    assert klamp.mean(kl, mask).item() == pytest.approx(1.4 / 6)
    assert klamp.mean(kl, mask, "sequence").item() == pytest.approx(1.4 / 2)
    assert klamp.mean(kl, mask, "sequence_mean").item() == pytest.approx(0.6 / 2)
    assert klamp.mean(kl, mask, "sequence", count_empty=True).item() == pytest.approx(1.4 / 3)
    assert klamp.mean(kl, mask, "sequence_mean", count_empty=True).item() == pytest.approx(0.6 / 3)


@pytest.mark.parametrize("per", UNITS)
@pytest.mark.parametrize("shape", [(0, 4), (3, 0), (2, 4)])
def test_an_all_masked_batch_is_an_answer(per: str, shape: tuple[int, int]) -> None:
    x = torch.full(shape, float("nan")).requires_grad_()
    mask = torch.zeros(shape, dtype=torch.bool)
    total, count = sum_count(x, mask, per=per)  # type: ignore[arg-type]
    assert (total.item(), count.item()) == (0, 0)
    mean = klamp.mean(x, mask, per)  # type: ignore[arg-type]
    mean.backward()
    assert mean.item() == 0
    assert x.grad is not None
    assert (x.grad == 0).all()


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.int64, torch.uint8, torch.float32, torch.bfloat16])
def test_masks_of_any_dtype_select(dtype: torch.dtype) -> None:
    x = torch.tensor([[1.0, 2.0, 4.0]])
    mask = torch.tensor([[1, 0, 1]]).to(dtype)
    assert klamp.mean(x, mask).item() == 2.5
    assert as_mask(None, x).all()


def test_half_precision_is_summed_in_float32_and_float64_stays() -> None:
    x = torch.full((1, 4096), 1.001, dtype=torch.bfloat16)
    assert klamp.mean(x, per="sequence").dtype == torch.float32
    assert klamp.mean(x, per="sequence").item() == pytest.approx(4096 * x[0, 0].item())
    assert klamp.mean(x.double()).dtype == torch.float64


def test_non_contiguous_input_and_one_dimension() -> None:
    x = torch.arange(12.0).view(3, 4).t()
    mask = (torch.arange(12).view(3, 4) % 2 == 0).t()
    assert not x.is_contiguous()
    assert klamp.mean(x, mask, "sequence").item() == klamp.mean(x.contiguous(), mask.contiguous(), "sequence").item()
    assert klamp.mean(torch.tensor([1.0, 3.0])).item() == 2.0


def test_select_fills_and_stops_the_gradient() -> None:
    x = torch.tensor([1.0, float("nan")], requires_grad=True)
    y = select(x, torch.tensor([True, False]), fill=-7.0)
    y.exp().sum().backward()
    assert y.tolist() == [1.0, -7.0]
    assert x.grad is not None
    assert x.grad[1] == 0


def test_every_function_stays_on_the_device_of_its_input() -> None:
    """The meta device refuses to mix with tensors of another and to be read: what runs there waits for no GPU."""
    a, b, c = (torch.zeros(3, 4, device="meta", requires_grad=True) for _ in range(3))
    x, y = (torch.zeros(3, 4, 5, device="meta", requires_grad=True) for _ in range(2))
    mask = torch.zeros(3, 4, device="meta")
    outs = [klamp.estimator(name)(a, b) for name in ("k1", "k2", "k3", "k3+", "abs", "r_log_r", "chi2_minus_kl")]
    outs += [klamp.k3(a, b, tail=5.0), klamp.k3_clamped(a, b), klamp.fitted(a, b, mask)]
    outs += [klamp.weighted("k3", a, b, c), klamp.weighted("k3", a, b, c, tail=5.0), klamp.exact(x, y)]
    outs += [klamp.exact_forward(x, y), klamp.top_k_exact(x, y, mask.long(), k=2)]
    outs += [klamp.mean(a, mask, per, count_empty=empty) for per in UNITS for empty in (False, True)]
    beta = torch.zeros((), device="meta")
    outs += [klamp.in_loss(a, beta, mask), klamp.in_loss(a, 0.1, mask, count=7), klamp.in_reward(a, b, beta, mask)]
    outs += [klamp.in_advantage(a, b, 0.1, mask, centre=centre) for centre in ("batch", "sequence", "none")]
    outs += [klamp.in_advantage(a, b, beta, mask, mean=0.3)]
    outs += [*klamp.sequence_exact(a, beta, mask, logp=b, old_logp=c, baseline="position")]
    assert {out.device.type for out in outs} == {"meta"}
    torch.autograd.grad(sum(out.sum() for out in outs if out.requires_grad), [a, x])
