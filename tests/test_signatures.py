"""What `help(misvo.steer)`, an IDE and the command line show of the settings: every field of Settings, once, as it is.

What a type checker makes of it is in typed_use.py, which `make lint` reads.
"""

import ast
import inspect
import pydoc
import re
import typing
from dataclasses import MISSING, fields
from pathlib import Path

import pytest

import misvo
from misvo import cli_options, settings_page
from misvo.options import Options, SettingsOptions
from misvo.settings import PRESETS, SAMPLER, Settings

FIELDS = {field.name: field for field in fields(Settings)}
TAKE_OPTIONS = {
    "steer": misvo.steer,
    "steer_many": misvo.steer_many,
    "from_preset": Settings.from_preset,
}


def test_the_typed_names_are_the_fields_of_the_settings():
    hints = typing.get_type_hints(SettingsOptions)
    assert hints == typing.get_type_hints(Settings) and list(hints) == list(FIELDS)
    assert SettingsOptions.__required_keys__ == Options.__required_keys__ == frozenset()
    assert typing.get_type_hints(Options) == {**hints, "preset": str}


@pytest.mark.parametrize("name", TAKE_OPTIONS)
def test_a_signature_shows_every_setting_with_its_default(name):
    """Given as they are shown, the defaults make the settings that come of giving nothing."""
    shown = inspect.signature(TAKE_OPTIONS[name]).parameters
    assert [parameter for parameter in shown if parameter in FIELDS] == list(FIELDS)
    assert not any(parameter.kind is parameter.VAR_KEYWORD for parameter in shown.values())
    defaults = {option: shown[option].default for option in ("preset", *FIELDS)}
    assert MISSING not in defaults.values() and inspect.Parameter.empty not in defaults.values()
    assert Settings.from_preset(**defaults) == Settings.from_preset() != Settings.from_preset("paper")
    assert {option: shown[option].annotation for option in FIELDS} == typing.get_type_hints(SettingsOptions)


@pytest.mark.parametrize("name", TAKE_OPTIONS)
def test_help_says_what_each_setting_is_for_and_who_has_it(name):
    text = pydoc.plain(pydoc.render_doc(TAKE_OPTIONS[name]))
    said = dict(re.findall(r"^ +(\w+): (.+)$", text, re.MULTILINE))
    for option, field in FIELDS.items():
        assert said[option].startswith(field.metadata["about"].rstrip("."))
        for choice in field.metadata["names"] or ():
            assert choice in said[option]
        owners = re.search(r"\(([\w -]+) only\)$", said[option])
        assert (owners and tuple(owners[1].split(" and "))) == field.metadata["methods"]


def test_functions_still_work_as_they_are_written():
    """The signature is for readers: what is not in it is refused by name, and positions are what they were."""
    with pytest.raises(misvo.MisvoError, match=r"unknown setting 'rollout': did you mean 'rollouts'\?"):
        Settings.from_preset("paper", rollout=3)
    for function in (misvo.steer, misvo.steer_many):
        positional = [p.name for p in inspect.signature(function).parameters.values() if p.kind is not p.KEYWORD_ONLY]
        assert positional == ["policy", "prompt" if function is misvo.steer else "prompts", "reward"]


def test_the_command_line_has_the_same_settings_and_the_same_words():
    options = {parameter.name: parameter.annotation.__metadata__[0] for parameter in cli_options.parameters()}
    assert set(FIELDS) - set(options) == set(cli_options.LEFT_OUT)
    for name, option in options.items():
        assert option.help.startswith(FIELDS[name].metadata["about"].rstrip("."))
        auto = PRESETS["auto"].get(name)
        assert auto in (None, True) or f"[auto: {auto}; " in option.help


def test_an_ide_finds_the_names_that_load_on_first_use():
    """They stand under TYPE_CHECKING once more, because nothing else is read by an IDE: the same names, no others."""
    tree = ast.parse(Path(misvo.__file__).read_text(encoding="utf-8"))
    block = next(node for node in tree.body if isinstance(node, ast.If))
    seen = {alias.asname: (line.module, alias.name) for line in block.body for alias in line.names}
    assert seen == {name: (home, name) for name, home in misvo._HOMES.items()} | {
        room: ("misvo", room) for room in misvo._ROOMS
    }
    assert (Path(misvo.__file__).parent / "py.typed").is_file()


def test_the_page_of_settings_says_what_the_fields_say():
    written = (Path(__file__).parent.parent / "docs" / "settings.md").read_text(encoding="utf-8")
    assert written == settings_page.page(), "python -m misvo.settings_page > docs/settings.md"
    rows = [line.strip("| ").split(" | ") for line in written.splitlines() if line.startswith("| `")]
    assert [row[0].strip("`") for row in rows] == list(FIELDS)
    shown = inspect.signature(misvo.steer).parameters
    for name, about, _, methods, *values in (map(str.strip, row) for row in rows):
        field = FIELDS[name.strip("`")]
        assert about == field.metadata["about"] and methods == ", ".join(field.metadata["methods"] or ["all"])
        auto, paper = (value.strip("`") for value in (*values, "", "")[:2])
        own = "as the model came" if field.name in SAMPLER else said(shown[field.name].default)
        assert (auto, paper) == (own, said(field.default))


def said(value):
    return "" if value in (None, ()) else str(value).lower() if isinstance(value, bool) else str(value)
