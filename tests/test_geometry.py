"""The geometry of a model read from its configuration, in the forms of transformers 4 and 5."""

import re
from types import SimpleNamespace
from typing import Any

import pytest

from oscar_vllm.geometry import GeometryError, ModelGeometry

GEOMETRY = ModelGeometry(
    model_type="llama",
    num_layers=2,
    num_heads=6,
    num_kv_heads=2,
    head_size=4,
    hidden_size=24,
    rope_type="default",
    rope_theta=10000.0,
)


def config(**fields: Any) -> SimpleNamespace:
    common = {"model_type": "llama", "num_hidden_layers": 2, "num_attention_heads": 6, "hidden_size": 24}
    return SimpleNamespace(**common | fields)


@pytest.mark.parametrize(
    "fields",
    [
        {"num_key_value_heads": 2, "head_dim": 4, "rope_parameters": {"rope_type": "default", "rope_theta": 10000}},
        {"num_key_value_heads": 2, "head_dim": None, "rope_theta": 10000.0, "rope_scaling": None},
        {"num_key_value_heads": 2, "rope_theta": 10000.0, "rope_scaling": {"type": "default"}},
        {
            "num_key_value_heads": 2,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 1.0},
                "full_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        },
    ],
    ids=["transformers 5", "transformers 4", "old rope key", "rope per layer kind"],
)
def test_geometry_from_a_configuration(fields: dict[str, Any]) -> None:
    geometry = ModelGeometry.from_hf_config(config(**fields))
    assert geometry == GEOMETRY
    assert geometry.hash() == GEOMETRY.hash()
    nested = SimpleNamespace(model_type="vision", get_text_config=lambda: config(**fields))
    assert ModelGeometry.from_hf_config(nested) == GEOMETRY


def test_geometry_without_optional_fields() -> None:
    geometry = ModelGeometry.from_hf_config(config())
    assert (geometry.num_kv_heads, geometry.head_size, geometry.rope_type, geometry.rope_theta) == (6, 4, "none", 0.0)
    yarn = config(rope_theta=1e6, rope_scaling={"rope_type": "yarn", "factor": 4.0})
    assert ModelGeometry.from_hf_config(yarn).rope_type == "yarn"


def test_geometry_hash_sees_every_field() -> None:
    changes = dict.fromkeys(ModelGeometry.model_fields, 3) | {"model_type": "a", "rope_type": "b"}
    hashes = {GEOMETRY.model_copy(update={name: value}).hash() for name, value in changes.items()}
    assert len(hashes | {GEOMETRY.hash()}) == len(changes) + 1


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        (
            {"num_hidden_layers": None},
            "The model's configuration has no num_hidden_layers; only decoder-only attention models are supported.",
        ),
        (
            {"num_key_value_heads": 4},
            "The model's 6 query heads do not divide among 4 KV heads; serve it with another attention backend.",
        ),
        (
            {"num_hidden_layers": 0},
            "The model's configuration is not one this project can serve: num_layers is 0.",
        ),
    ],
    ids=["missing", "heads", "zero"],
)
def test_configurations_that_say_too_little(fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(GeometryError, match=f"^{re.escape(sentence)}$"):
        ModelGeometry.from_hf_config(config(**fields))
