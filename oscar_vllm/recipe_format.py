"""The recipe file, format version 1: names, shapes, metadata, and every check a recipe has to pass.

Ten float32 tensors (``TENSORS``) and string metadata (``RecipeMetadata``) in one safetensors file. L layers, H KV
heads, D channels.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from oscar_vllm.cache.layout import FORMAT_VERSION as PAGE_FORMAT_VERSION
from oscar_vllm.geometry import ModelGeometry
from oscar_vllm.recipe_diagnostics import RecipeDiagnostics

FORMAT = "oscar_recipe"
FORMAT_VERSION = 1
GAIN_RANGE = (0.5, 2.0)
FIT_TOLERANCE = 1e-3
"""Largest entry of ``key @ query^T - I`` and ``value @ output - I``."""
MATRICES = ("key", "query", "value", "output")
MEANS = ("key_mean", "value_mean")
CLIPS = ("key_clip", "value_clip")
GAINS = ("key_gain", "value_gain")
TENSORS = (*MATRICES, *MEANS, *CLIPS, *GAINS)
_MAX_HEADER = 1 << 20
"""Bytes; a real header has about 2,000, and a lying one must not cost memory."""
_MAX_FILE = 4 << 30
"""Bytes; 96 layers of 96 KV heads of 128 channels take 2.4 GB, and tensors are read whole."""
_AGAIN = "make it again with `oscar calibrate MODEL`"


class RecipeError(ValueError):
    """A recipe that cannot be used; the message is one sentence that says what is wrong and what to do."""


class RecipeMetadata(BaseModel):
    """What the tensors belong to and how they were made. Kept as strings in the file's header."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    format: Literal["oscar_recipe"] = "oscar_recipe"
    format_version: Annotated[int, Field(ge=FORMAT_VERSION, le=FORMAT_VERSION)] = FORMAT_VERSION
    page_format_version: Annotated[int, Field(ge=PAGE_FORMAT_VERSION, le=PAGE_FORMAT_VERSION)] = PAGE_FORMAT_VERSION
    model: str
    """Id or path of the model the recipe was made for; informative."""
    geometry: ModelGeometry
    geometry_hash: str
    method: str
    """"oscar", "hadamard", ..."""
    centered: bool
    """Whether the means were calibrated; they are zero otherwise."""
    rounds: Annotated[int, Field(ge=0, le=16)]
    """Least-squares refits of scale and minimum to the codes when a row is written."""
    start: Literal["range", "moments"] = "range"
    """What scale and minimum of a row start from: its range after the clip, or its mean and standard deviation."""
    positions: Annotated[int, Field(ge=0)] = 0
    """Over which calibration followed the keys; 0: it saw those of its own prompts alone."""
    text_hash: str
    """Of the calibration text; empty without calibration."""
    tokens: Annotated[int, Field(ge=0)]
    """Calibration tokens."""
    diagnostics: RecipeDiagnostics | None = None
    """What calibration measured; None if it was not kept. Not part of the recipe's hash."""

    @field_validator("geometry", mode="before")
    @classmethod
    def _geometry_from_json(cls, value: Any) -> Any:
        return ModelGeometry.model_validate_json(value) if isinstance(value, str) else value

    @field_validator("diagnostics", mode="before")
    @classmethod
    def _diagnostics_from_json(cls, value: Any) -> Any:
        return RecipeDiagnostics.model_validate_json(value) if isinstance(value, str) else value

    def to_strings(self) -> dict[str, str]:
        """As the file keeps them: numbers as digits, the geometry and the diagnostics as JSON."""
        fields = self.model_dump(mode="json", exclude={"diagnostics"}) | {"geometry": self.geometry.model_dump_json()}
        if self.diagnostics is not None:
            fields["diagnostics"] = self.diagnostics.model_dump_json()
        return {name: value if isinstance(value, str) else str(value).lower() for name, value in fields.items()}

    @classmethod
    def from_strings(cls, strings: Mapping[str, str]) -> Self:
        """The inverse of ``to_strings``.

        Raises:
            RecipeError: another format or version, a missing, unknown or malformed field.
        """
        if strings.get("format") != FORMAT:
            raise RecipeError(f"The file is not an OSCAR recipe; {_AGAIN} or give another file.")
        version = strings.get("format_version")
        if version != str(FORMAT_VERSION):
            raise RecipeError(
                f"The recipe has format version {_short(version)} and this release reads version {FORMAT_VERSION}; "
                f"install the release it was made with or {_AGAIN}."
            )
        page = strings.get("page_format_version")
        if page != str(PAGE_FORMAT_VERSION):
            raise RecipeError(
                f"The recipe was made for page format {_short(page)} and this release writes {PAGE_FORMAT_VERSION}; "
                f"{_AGAIN}."
            )
        try:
            return cls.model_validate(strings)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = ".".join(map(str, first["loc"])) or "metadata"
            raise RecipeError(
                f"The recipe's metadata do not hold ({_short(where)}: {_short(first['msg'])}); {_AGAIN}."
            ) from None


def tensor_shapes(geometry: ModelGeometry) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor of a recipe for this geometry."""
    L, H, D = geometry.num_layers, geometry.num_kv_heads, geometry.head_size
    shapes: dict[str, tuple[int, ...]] = dict.fromkeys(MATRICES, (L, H, D, D))
    return shapes | dict.fromkeys(MEANS, (L, H, D)) | dict.fromkeys((*CLIPS, *GAINS), (L, H))


def check_header_size(path: Path) -> None:
    """Refuse a file that is shorter than it claims, or claims a header no recipe has, before anything is parsed."""
    with path.open("rb") as stream:
        prefix = stream.read(8)
        size = stream.seek(0, 2)
    if size > _MAX_FILE:
        raise RecipeError(f"The file has {size:,} bytes, more than the {_MAX_FILE:,} of any recipe; {_AGAIN}.")
    header = int.from_bytes(prefix, "little")
    if size < 8 or header > min(size - 8, _MAX_HEADER):
        raise not_whole("the header's length is wrong")


def not_whole(reason: str) -> RecipeError:
    return RecipeError(f"The file is not a whole safetensors file ({_short(reason)}); copy it or {_AGAIN}.")


def check_file_tensors(stream: Any, geometry: ModelGeometry) -> None:
    """Compare the names, dtypes and shapes in an open safetensors file with the geometry; no tensor is read."""
    names = set(stream.keys())
    if names != set(TENSORS):
        missing, extra = sorted(set(TENSORS) - names), sorted(names - set(TENSORS))
        what = f"lacks the tensor {missing[0]}" if missing else f"has an unknown tensor {_short(extra[0])}"
        raise RecipeError(f"The recipe {what}; {_AGAIN}.")
    for name, shape in tensor_shapes(geometry).items():
        part = stream.get_slice(name)
        check_shape(name, tuple(part.get_shape()), part.get_dtype() == "F32", shape)


def check_shape(name: str, shape: tuple[int, ...], is_float32: bool, expected: tuple[int, ...]) -> None:
    if shape != expected or not is_float32:
        found = f"shape {list(shape)}" if shape != expected else "another dtype"
        raise RecipeError(f"The recipe's {name} has {found} instead of {list(expected)} in float32; {_AGAIN}.")


def check_metadata(metadata: RecipeMetadata) -> None:
    if metadata.geometry_hash != metadata.geometry.hash():
        raise RecipeError(f"The recipe's geometry hash is not that of its geometry; {_AGAIN}.")
    if metadata.geometry.num_heads % metadata.geometry.num_kv_heads:
        raise RecipeError(f"The recipe's KV heads do not divide its query heads; {_AGAIN}.")


def check_values(tensors: Mapping[str, torch.Tensor], centered: bool) -> None:
    """Every number finite and in range, and the matrices inverse to each other, layer by layer."""
    for name, tensor in tensors.items():
        _require(torch.isfinite(tensor), f"{name} holds a number that is not finite")
    for name in CLIPS:
        _require((tensors[name] > 0) & (tensors[name] <= 1), f"{name} is outside (0, 1]")
    low, high = GAIN_RANGE
    for name in GAINS:
        _require((tensors[name] >= low) & (tensors[name] <= high), f"{name} is outside [{low:g}, {high:g}]")
    for name in () if centered else MEANS:
        _require(tensors[name] == 0, f"{name} is not zero although the recipe says it is not centered")
    for left, right, error in _fit_errors(tensors):
        _require(error <= FIT_TOLERANCE, f"{left} and {right} matrices do not undo each other")


def _fit_errors(tensors: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, str, torch.Tensor]]:
    """Yields (left, right, [L, H] largest entry of left @ right - I)."""
    eye = torch.eye(tensors["key"].shape[-1], dtype=torch.float32, device=tensors["key"].device)
    for left, right, transposed in (("key", "query", True), ("value", "output", False)):
        layers = zip(tensors[left], tensors[right], strict=True)  # one layer at a time: bounded memory
        errors = [(a @ (b.mT if transposed else b) - eye).abs().amax((-1, -2)) for a, b in layers]
        yield left, right, torch.stack(errors)


def _require(holds: torch.Tensor, what: str) -> None:
    """``holds``: [L, H, ...] bool. NaN compares false, so it never passes."""
    if not holds.all():
        layer, head = (~holds).nonzero()[0, :2].tolist()
        raise RecipeError(f"The recipe's {what} (layer {layer}, KV head {head}); {_AGAIN}.")


def _short(text: object, limit: int = 100) -> str:
    """Foreign text made fit for one line of an error message."""
    line = " ".join(str(text).split()).rstrip(".")
    return line if len(line) <= limit else line[: limit - 3] + "..."
