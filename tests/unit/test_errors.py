"""An error is data: the field, its value and the way out; whoever shows it chooses how settings are spelled."""

from __future__ import annotations

import inspect
import pickle
import pkgutil
from typing import Any

import pytest

import klamp
from klamp import errors
from klamp.cli import main
from klamp.cli.main import flag
from klamp.errors import ConfigError, KlampError, Setting, require_number, unknown
from klamp.references import parse
from klamp.train.config import KLConfig


def test_field_value_and_way_out_are_attributes() -> None:
    error = ConfigError("kl.limit", -1, "Leave it out.", problem="must be > 0, got {value}")
    assert (error.field, error.value, error.way_out) == ("kl.limit", -1, "Leave it out.")
    assert str(error) == "kl.limit must be > 0, got -1. Leave it out."
    assert str(ConfigError("kl.limit", -1, "Leave it out.")) == "kl.limit cannot be -1. Leave it out."


def test_refusals_of_numbers_and_names_are_such_data() -> None:
    with pytest.raises(ConfigError) as raised:
        require_number("optim.lr", "fast", above=0, way_out="1e-4 is usual.")
    assert (raised.value.field, raised.value.value, raised.value.way_out) == ("optim.lr", "fast", "1e-4 is usual.")
    error = unknown("kl.per", "tokens", ("token", "sequence"))
    assert (error.field, error.value) == ("kl.per", "tokens")
    assert error.way_out == "Did you mean 'token'? Choose from: sequence, token."


def test_a_whole_message_names_its_settings() -> None:
    with pytest.raises(ConfigError) as raised:
        KLConfig(target=0.1)
    assert raised.value.field == "kl.target"
    assert Setting("kl.per", "token") in raised.value.settings
    assert "Add kl.per=token, kl.per=sequence" in str(raised.value)


@pytest.mark.parametrize(
    ("setting", "spelled"),
    [
        (Setting("kl.max_weight", "2"), "--kl.max-weight 2"),
        (Setting("kl.controller", "'fixed'"), "--kl.controller fixed"),
        (Setting("kl.clamp", "false"), "--kl.no-clamp"),
        (Setting("kl.allow_biased", "true"), "--kl.allow-biased"),
        (Setting("save_every"), "--save-every"),
    ],
)
def test_a_setting_as_a_flag(setting: Setting, spelled: str) -> None:
    assert flag(setting) == spelled


def test_an_error_about_a_part_is_placed_within_the_whole() -> None:
    with pytest.raises(ConfigError) as raised:
        parse("ema:2")
    assert raised.value.field == "reference"
    assert raised.value.within("kl").field == "kl.reference"
    assert str(raised.value.within("kl")).startswith("kl.reference 'ema:2': Ema.decay must be < 1")


def test_text_that_only_looks_like_a_setting_is_left_alone(capsys: Any, tmp_path: Any) -> None:
    """A path named like a field stays a path: nothing is found by its looks."""
    assert main(["train", "--run", str(tmp_path), "--prompts", "kl.beta=2"]) == 2
    assert "'kl.beta=2'" in capsys.readouterr().err


def test_help_and_what_does_not_parse_are_shown_once(capsys: Any) -> None:
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    assert capsys.readouterr().out.count("usage: klamp train") == 1
    with pytest.raises(SystemExit) as stopped:
        main(["train", "--nonsense", "1"])
    shown = capsys.readouterr()
    assert stopped.value.code == 2
    assert (shown.out + shown.err).count("For full helptext") == 1


def test_errors_travel_between_processes() -> None:
    error = ConfigError("kl.limit", -1, "Leave it out.")
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.field, again.way_out) == (str(error), error.field, error.way_out)


def test_every_exception_of_klamps_is_in_one_place() -> None:
    for module in pkgutil.walk_packages(klamp.__path__, "klamp."):
        if any(part in module.name for part in ("integrations", "triton", "fused", "__main__")):
            continue
        try:
            found = __import__(module.name, fromlist=["_"])
        except ModuleNotFoundError as error:  # an extra that is not installed
            if str(error.name).startswith("klamp"):
                raise
            continue
        for name, kind in inspect.getmembers(found, inspect.isclass):
            if issubclass(kind, KlampError) and kind.__module__ == module.name:
                assert module.name == errors.__name__, f"{name} is in {module.name}"
