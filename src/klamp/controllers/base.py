"""What every controller shares: its state as a value, the protocol, and the checks of its settings.

A controller is a frozen dataclass of settings. ``init()`` makes a :class:`State`; ``update(state, kl, n)`` returns the
next one and changes nothing. So a resumed run continues to the bit, every rank holds the same beta, and a logged KL
series can be replayed through another controller. :class:`klamp.Control` carries settings and state through a loop.
"""

from __future__ import annotations

import functools
import inspect
import json
import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from typing import Any, ClassVar, Protocol, TypeVar

from klamp.errors import ConfigError, require_number, require_ranges, shown, warn
from klamp.masked import Unit, check_unit
from klamp.strict_json import from_plain

logger = logging.getLogger(__name__)

Bounds = tuple[float, float]
Known = float | None
"""A number, or None where it is not known."""
SMALLEST, LARGEST = 1e-300, 1e300
"""Where a price without bounds stops, before a float underflows to 0 or overflows."""


@dataclass(frozen=True)
class State:
    """The price and what it took to find it. Plain numbers only: it goes to JSON and back without loss."""

    beta: float
    """The price of one nat: reward, or standard deviations of advantage where those are normalised."""
    updates: int = 0
    """Updates that counted."""
    skipped: int = 0
    """Updates left out because the KL was NaN or infinite."""

    kinds: ClassVar[dict[str, type[State]]] = {}
    sane: ClassVar[dict[str, tuple[float, float]]] = {"beta": (0.0, 1e300), "updates": (0, 1e15), "skipped": (0, 1e15)}
    """Where the numbers of a saved state lie; one that has others is damaged."""
    of_kl: ClassVar[tuple[str, ...]] = ()
    """The numbers that are of the present KL, and not of how it answers."""
    law: ClassVar[int] = 0
    """Counted up when the rule gives other prices than before, so that a state from before can say so."""

    def __init_subclass__(cls, law: int | None = None) -> None:
        if law is not None:
            cls.law = law
        State.kinds[cls.__name__] = cls

    def retargeted(self, old: float, new: float) -> State:
        """The state to go on from when the target changes from ``old`` to ``new``: a price alone stays.

        Args:
            old: the target that it was steered to.
            new: the target that it is steered to from here on.

        Returns:
            The state for ``new``.
        """
        return self

    def restarted(self) -> State:
        """The state to go on from when KL begins at 0 again, because the policy became its own reference.

        Returns:
            The state without what is known of the KL before.
        """
        at_first: dict[str, Any] = {each.name: each.default for each in fields(self) if each.name in self.of_kl}
        return replace(self, **at_first)

    def to_dict(self) -> dict[str, Any]:
        """A dictionary of JSON values; :meth:`from_dict` reverses it.

        Returns:
            Plain values, the name of the class among them.
        """
        return {"kind": type(self).__name__, **({"law": self.law} if self.law else {}), **asdict(self)}

    @staticmethod
    def from_dict(saved: Mapping[str, Any]) -> State:
        """The state that :meth:`to_dict` wrote, of the class that wrote it.

        Where the rule has changed since, the logger ``klamp.controllers.base`` says so.

        Args:
            saved: what :meth:`to_dict` returned.

        Returns:
            The state. A damaged one is a :class:`klamp.ConfigError`.
        """
        if not isinstance(saved, Mapping):
            raise ConfigError(
                f"a saved controller state must be an object, got {shown(saved)}. Start anew with init()."
            )
        name = saved.get("kind", "State")
        kind = State.kinds.get(name) if isinstance(name, str) else None
        names = {f.name for f in fields(kind)} if kind else set()
        given = {k: v for k, v in saved.items() if k != "kind" and (k != "law" or k in names)}
        if name == "HoldState" and set(given) != names and {f.name for f in fields(State)} <= set(given):
            raise ConfigError(
                "a saved controller state is of an earlier law of Hold, which this version does not go on from. Its "
                f"last price was {(last := shown(given['beta']))}. Resume with ‹kl.beta={last}› to go on from that "
                f"price, start with Hold(..., init_beta={last}).init() in your own loop, or use the version that saved "
                "it."
            )
        if kind is None or set(given) != names:
            raise ConfigError(
                f"a saved controller state has kind {shown(name)} and fields {shown(sorted(map(str, given)))}, which "
                f"this version does not write. Kinds: {sorted(State.kinds)}. Start the controller anew with init()."
            )
        state = from_plain(kind, given)
        way_out = "The saved state is damaged; start the controller anew with init()."
        require_ranges(kind.__name__, state, kind.sane, way_out=way_out)
        if "law" not in names:
            law = require_number(f"{kind.__name__}.law", saved.get("law", 0), at_least=0, way_out=way_out)
            _note_law(state, law)
        return state

    def to_json(self) -> str:
        """:meth:`to_dict` as JSON text.

        Returns:
            A line of JSON.
        """
        return json.dumps(self.to_dict(), allow_nan=False)

    @staticmethod
    def from_json(text: str) -> State:
        """The state that :meth:`to_json` wrote.

        Args:
            text: what :meth:`to_json` returned.

        Returns:
            The state.
        """
        try:
            saved = json.loads(text)
        except (ValueError, TypeError, RecursionError) as error:
            raise ConfigError(f"a saved controller state is not JSON ({error}). Start anew with init().") from None
        return State.from_dict(saved)


def _note_law(state: State, law: float) -> None:
    """Say so where a saved ``state`` is of another ``law`` than its kind follows now."""
    if law == state.law:
        return
    warn(
        logger,
        "the saved state of %s was written %s. This version uses law %d and continues from the saved price, %.4g.",
        type(state).__name__.removesuffix("State") or "State",
        f"under law {law:g}" if law else "by a version that did not note its law",
        *(state.law, state.beta),
    )


State.kinds["State"] = State
S = TypeVar("S", bound=State)
FIRST_BETA = 0.1
"""The first price of a ``Hold`` that is told neither a spread nor a price."""


class Controller(Protocol):
    """Settings with ``init`` and a pure ``update``. Each rule takes what it needs of a reading and ignores the rest."""

    def init(self, *, spread: Known = None, length: Known = None, n: Known = None, signal: float = 1.0) -> State:
        """The state before the first update.

        Args:
            spread: RMS of the first batch's advantages within a prompt, where it is known; groups without signal count
                as zero.
            length: mean number of tokens in a completion, where it is known.
            n: sequences that are drawn for each update, where they are known and no clamp holds KL beside the price.
            signal: share of its groups that show a signal: whose completions differ in their reward.

        Returns:
            The state with the first price.
        """
        ...

    def update(
        self,
        state: Any,
        kl: float,
        n: int = 1,
        *,
        effort: float = 0.0,
        spread: Known = None,
        noise: Known = None,
        signal: float = 1.0,
    ) -> State:
        """The state after a reading.

        Args:
            state: what ``init`` or the last ``update`` returned; it is left as it is.
            kl: the batch's KL before its update, in the unit of the target.
            n: sequences behind ``kl``.
            effort: what a clamp undid of the update just made, as a change of ``log sqrt(KL)`` (``Clamped.effort``).
            spread: RMS of the batch's advantages within a prompt; groups without signal count as zero.
            noise: relative standard error of ``kl``.
            signal: share of its groups that show a signal; told to :meth:`init` too, or to neither.

        Returns:
            The next state; ``state`` stays as it is.
        """
        ...


def begin(controller: Controller, **known: float | None) -> State:
    """``controller.init`` with what is ``known``, ``spread`` and ``length`` for example, as far as it takes it."""
    return controller.init(**_taken(type(controller).init, known))  # type: ignore[arg-type]


def advance(controller: Controller, state: Any, kl: float, n: int = 1, **known: float | None) -> State:
    """``controller.update`` with what is ``known``, ``effort`` and ``spread`` for example, as far as it takes it.

    klamp's controllers take all of them; one written for ``update(state, kl, n)`` gets these alone.
    """
    return controller.update(state, kl, n, **_taken(type(controller).update, known))  # type: ignore[arg-type]


def _taken(function: Callable[..., Any], known: Mapping[str, float | None]) -> dict[str, float | None]:
    takes = _keywords(function)
    return {k: v for k, v in known.items() if k in takes or "**" in takes}


@functools.cache
def _keywords(function: Callable[..., Any]) -> frozenset[str]:
    """The names of a function's parameters, ``**`` among them where it takes any."""
    found = inspect.signature(function).parameters.values()
    return frozenset("**" if p.kind is p.VAR_KEYWORD else p.name for p in found)


def described(controller: Controller) -> str:
    """The kind and the plain settings of a controller, the same in every process: whose state a saved state is."""
    known: tuple[Any, ...] = fields(controller) if is_dataclass(controller) else ()
    values = {f.name: getattr(controller, f.name) for f in known}
    if values.get("init_beta", FIRST_BETA) is None:
        values["init_beta"] = FIRST_BETA
    plain = [f"{n}={v!r}" for n, v in values.items() if v is None or isinstance(v, int | float | str | tuple | list)]
    return f"{type(controller).__name__}({', '.join(plain)})"


def check_controller(name: str, controller: object) -> None:
    """A controller has ``init`` and ``update``."""
    if not all(callable(getattr(controller, method, None)) for method in ("init", "update")):
        raise ConfigError(
            f"{name} must have init() and a pure update(state, kl, n), got {shown(controller, 80)}. Pass "
            "klamp.Hold(target=0.05, per='token') or another controller of klamp's itself."
        )


def skip(state: S, kl: float, kind: type[State] = State) -> S | None:
    """The state to return when ``kl`` is NaN or infinite: unchanged but for the count. None when ``kl`` is a number.

    A ``state`` of another ``kind`` is refused.
    """
    own_state(state, kind)
    return None if math.isfinite(observed(kl)) else replace(state, skipped=state.skipped + 1)


def own_state(state: object, kind: type[State]) -> None:
    """Refuse a state that a controller with states of ``kind`` cannot go on from."""
    if type(state) is not kind:  # a HoldState is a State, and no price of Ziegler's
        raise ConfigError(
            f"state must be a {kind.__name__}, got {shown(state, 80)}. Start with the init() of the controller that "
            "is updated; a saved state goes to the kind of controller that saved it."
        )


def observed(kl: object) -> float:
    """``kl`` as a float, from a number or a tensor of one; anything else is refused."""
    try:
        return float(kl)  # type: ignore[arg-type]
    except (TypeError, ValueError, RuntimeError):
        given = " ".join(repr(kl).split())
        raise ConfigError(
            f"kl must be one number, got {given:.60}. Reduce it first: klamp.mean(kl, mask, per=...)."
        ) from None


def multiplied(beta: float, factor: float, bounds: Bounds | None) -> float:
    """``beta · factor`` inside the bounds, and always a positive finite float: a product never leaves 0 or inf."""
    low, high = bounds or (0.0, math.inf)
    return clip(beta * factor, max(low, SMALLEST), min(high, LARGEST))


def clip(x: float, low: float, high: float) -> float:
    """``x`` inside [low, high]."""
    return min(max(x, low), high)


@dataclass(frozen=True)
class Target:
    """A KL to hold, with its unit: ``Target(0.05, per="token")`` is one value, to be passed on as one.

    Args:
        kl: nats per ``per``, > 0.
        per: ``"token"``, ``"sequence"`` (the sum over a sequence) or ``"sequence_mean"``.
    """

    kl: float
    per: Unit

    def __post_init__(self) -> None:
        _check_nats("Target", "kl", self.kl, check_unit("Target.per", self.per))

    def __str__(self) -> str:
        return f"{self.kl:g} nats per {self.per}"


def nats(target: float | Target) -> float:
    """The number of a target."""
    return target.kl if isinstance(target, Target) else target


def split_target(name: str, target: Any, per: Any) -> tuple[Any, Any]:
    """(number, unit) of a target that is one value or two; a unit given twice must be the same."""
    if not isinstance(target, Target):
        return target, per
    if per not in (None, target.per):
        raise ConfigError(f"{name}.per is {shown(per)}, and the target is {target}. Leave per out.")
    return target.kl, target.per


def settle_target(controller: Any) -> None:
    """A controller's target is a positive number with a unit, given as one :class:`Target` or as the two."""
    name = type(controller).__name__
    target, per = split_target(name, controller.target, controller.per)
    object.__setattr__(controller, "target", target)
    object.__setattr__(controller, "per", per)
    _check_nats(name, "target", target, check_unit(f"{name}.per", per))


def _check_nats(name: str, field: str, target: object, unit: Unit) -> None:
    way_out = f"It is a KL in nats per {unit}; for a constant coefficient use Fixed(beta=...)."
    if isinstance(target, str | bytes | bytearray):  # float() would read it, and arithmetic later fail on it
        raise ConfigError(f"{name}.{field} must be a number, got {shown(target)}. {way_out}")
    require_number(f"{name}.{field}", target, above=0, way_out=way_out)


def first_price(name: str, init_beta: float | None, bounds: Bounds) -> float:
    """``init_beta``, :data:`FIRST_BETA` where it is None: a number > 0 inside the bounds."""
    first = FIRST_BETA if init_beta is None else init_beta
    require_number(f"{name}.init_beta", first, above=0, way_out="It is the price before the first update.")
    check_bounds(name, bounds, around=first)
    return first


def tokens(name: str, per: Unit | None, length: float | None) -> float:
    """How many times a target counts in a sequence: 1 where it is per sequence, else the mean number of tokens."""
    if per == "sequence":
        return 1.0
    if length is None:
        raise ConfigError(
            f"length is missing: {name}.init(spread=...) with per={per!r} needs the mean number of tokens in a "
            "completion. Pass length=..., or leave spread out to start at init_beta."
        )
    return require_number("length", length, above=0, way_out="It is the mean number of tokens in a completion.")


def sequences(n: float) -> float:
    """How many sequences are in an update."""
    return require_number("n", n, above=0, way_out="It is the sequences that are drawn for each update.")


def groups_told(signal: float, spread: float | None) -> float:
    """The share of the groups that show a signal; without a ``spread`` none does, and 1 divides nothing."""
    if not spread:
        return 1.0
    return min(require_number("signal", signal, at_least=0, way_out="It is the share of groups that show one."), 1.0)


def check_bounds(name: str, bounds: Bounds | None, *, around: float | None = None, field: str = "init_beta") -> None:
    """Bounds are (low, high) with 0 <= low < high, and contain the starting price."""
    if bounds is None:
        return
    if not isinstance(bounds, tuple | list) or len(bounds) != 2:
        raise ConfigError(f"{name}.bounds must be a pair (low, high), got {bounds!r}. Example: bounds=(1e-4, 10.0).")
    low = require_number(f"{name}.bounds[0]", bounds[0], at_least=0, way_out="A price is never negative.")
    if bounds[1] != math.inf:
        require_number(f"{name}.bounds[1]", bounds[1], way_out="It is the highest price; math.inf for none.")
    if not low < float(bounds[1]):
        raise ConfigError(f"{name}.bounds must be (low, high) with low < high, got {bounds!r}. Swap the two.")
    if around is not None and not low <= around <= bounds[1]:
        raise ConfigError(f"{name}.{field} must lie inside bounds {bounds!r}, got {around!r}. Widen the bounds.")
