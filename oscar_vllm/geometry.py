"""What a recipe must agree on with a model: the shape of its attention and how it encodes positions."""

import hashlib
import json
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

Count = Annotated[int, Field(ge=1, le=1 << 20)]


class GeometryError(ValueError):
    """A model configuration that says too little about its attention; the message is one sentence."""


class ModelGeometry(BaseModel):
    """The attention geometry of a model. Two models of one geometry can exchange recipes without an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    model_type: str
    num_layers: Count
    num_heads: Count
    """Query heads."""
    num_kv_heads: Count
    head_size: Count
    hidden_size: Count
    rope_type: str
    """"default", "yarn", "llama3", ...; "none" without rotary embedding."""
    rope_theta: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    """0 without rotary embedding."""

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.num_heads // self.num_kv_heads

    @classmethod
    def from_hf_config(cls, hf_config: Any) -> "ModelGeometry":
        """Read a transformers configuration (version 4 or 5; of a multimodal model, its text part).

        Raises:
            GeometryError: a field is missing, or the KV heads do not divide the query heads.
        """
        config = hf_config.get_text_config() if hasattr(hf_config, "get_text_config") else hf_config
        query_heads = _read(config, "num_attention_heads")
        hidden_size = _read(config, "hidden_size")
        kv_heads = getattr(config, "num_key_value_heads", None) or query_heads
        rope_type, rope_theta = _rope(config)
        try:
            geometry = cls(
                model_type=_read(config, "model_type"),
                num_layers=_read(config, "num_hidden_layers"),
                num_kv_heads=kv_heads,
                num_heads=query_heads,
                head_size=getattr(config, "head_dim", None) or hidden_size // query_heads,
                hidden_size=hidden_size,
                rope_type=rope_type,
                rope_theta=rope_theta,
            )
        except ValidationError as error:
            first = error.errors()[0]
            raise GeometryError(
                f"The model's configuration is not one this project can serve: {first['loc'][0]} is {first['input']!r}."
            ) from None
        if geometry.num_heads % geometry.num_kv_heads:
            raise GeometryError(
                f"The model's {geometry.num_heads} query heads do not divide among {geometry.num_kv_heads} KV heads; "
                "serve it with another attention backend."
            )
        return geometry

    def hash(self) -> str:
        """16 hexadecimal digits over all fields."""
        canonical = json.dumps(self.model_dump(mode="json"), sort_keys=True)
        return hashlib.sha256(canonical.encode()).hexdigest()[:16]

    def __str__(self) -> str:
        return (
            f"{self.model_type}, {self.num_layers} layers, {self.num_heads} query and {self.num_kv_heads} KV heads of "
            f"{self.head_size}, hidden size {self.hidden_size}, rope {self.rope_type} {self.rope_theta:g}"
        )


def _read(config: Any, name: str) -> Any:
    value = getattr(config, name, None)
    if value is None:
        raise GeometryError(
            f"The model's configuration has no {name}; only decoder-only attention models are supported."
        )
    return value


def _rope(config: Any) -> tuple[str, float]:
    """(type, base frequency): transformers 5 keeps both in ``rope_parameters``, version 4 in two attributes."""
    parameters = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    if parameters and all(isinstance(value, dict) for value in parameters.values()):
        # One set per kind of layer: that of the full-attention layers, the only ones whose cache is quantized.
        parameters = parameters.get("full_attention") or next(iter(parameters.values()))
    theta = parameters.get("rope_theta") or getattr(config, "rope_theta", None)
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    return (str(kind), float(theta)) if theta else ("none", 0.0)
