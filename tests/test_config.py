"""The options of --additional-config: what is accepted, and the sentence each wrong one gets."""

import re
from typing import Any

import pytest
from pydantic import ValidationError

from oscar_vllm.config import OscarConfig, OscarConfigError


@pytest.mark.parametrize(
    ("additional", "config"),
    [
        ({}, OscarConfig(recipe=None, sink=64, recent=256)),
        ({"oscar": {}}, OscarConfig()),
        ({"other_plugin": {"sink": 3}}, OscarConfig()),
        ({"oscar": {"recipe": "hadamard"}}, OscarConfig(recipe="hadamard")),
        ({"oscar": {"sink": 0, "recent": 0}}, OscarConfig(sink=0, recent=0)),
        ({"oscar": {"sink": 16, "recent": 4096}}, OscarConfig(sink=16, recent=4096)),
    ],
    ids=["none", "empty", "another plugin's", "recipe", "no windows", "windows"],
)
def test_options(additional: dict[str, Any], config: OscarConfig) -> None:
    assert OscarConfig.from_additional_config(additional) == config


def test_defaults_are_the_designs() -> None:
    config = OscarConfig()
    assert (config.recipe, config.sink, config.recent) == (None, 64, 256)


@pytest.mark.parametrize(
    ("additional", "sentence"),
    [
        ({"oscar": {"sinks": 64}}, 'unknown oscar option "sinks"; the options are recipe, sink, recent'),
        ({"oscar": {"": 1}}, 'unknown oscar option ""; the options are recipe, sink, recent'),
        ({"oskar": {"sink": 64}}, 'additional_config has no option "oskar"; did you mean "oscar"?'),
        ({"OSCAR": {"sink": 64}}, 'additional_config has no option "OSCAR"; did you mean "oscar"?'),
        ({"oscar": {}, "oscars": {}}, 'additional_config has no option "oscars"; did you mean "oscar"?'),
        (
            {"oscar": {"sink": 24}},
            'oscar option "sink": must be a multiple of 16 (the tokens of one window block), got 24',
        ),
        (
            {"oscar": {"recent": 1}},
            'oscar option "recent": must be a multiple of 16 (the tokens of one window block), got 1',
        ),
        ({"oscar": {"sink": -16}}, 'oscar option "sink": input should be greater than or equal to 0, got -16'),
        ({"oscar": {"recent": "256"}}, "oscar option \"recent\": input should be a valid integer, got '256'"),
        ({"oscar": {"recent": 256.0}}, 'oscar option "recent": input should be a valid integer, got 256.0'),
        ({"oscar": {"sink": True}}, 'oscar option "sink": input should be a valid integer, got True'),
        ({"oscar": {"sink": None}}, 'oscar option "sink": input should be a valid integer, got None'),
        ({"oscar": {"recipe": 7}}, 'oscar option "recipe": input should be a valid string, got 7'),
        ({"oscar": "hadamard"}, "\"oscar\" in additional_config must be a JSON object, not 'hadamard'"),
        ({"oscar": None}, '"oscar" in additional_config must be a JSON object, not None'),
        ({"oscar": {3: 1}}, 'unknown oscar option "3"; the options are recipe, sink, recent'),
        (
            "oscar",
            'additional_config must be a JSON object such as {"oscar": {"sink": 64}}, not a str',
        ),
    ],
    ids=[
        "unknown option",
        "empty name",
        "misspelt key",
        "capitals",
        "misspelt beside right",
        "not whole blocks",
        "less than a block",
        "negative",
        "string for tokens",
        "float for tokens",
        "bool for tokens",
        "null for tokens",
        "number for recipe",
        "string section",
        "null section",
        "name that is no string",
        "not an object",
    ],
)
def test_wrong_options_get_one_sentence(additional: Any, sentence: str) -> None:
    with pytest.raises(OscarConfigError, match=f"^{re.escape(sentence)}$"):
        OscarConfig.from_additional_config(additional)


def test_a_config_does_not_change() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        OscarConfig().sink = 0
