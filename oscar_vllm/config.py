"""What ``--additional-config '{"oscar": {...}}'`` may say."""

import difflib
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from oscar_vllm.cache.layout import WINDOW_TOKENS

KEY = "oscar"


class OscarConfigError(ValueError):
    """The options given to the backend are not usable."""


class OscarConfig(BaseModel):
    """Options of the OSCAR backend."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    recipe: str | None = None
    """Path of a recipe, a Hugging Face id (``org/name`` or ``org/name@revision``), or "hadamard" for the uncalibrated
    rotation. None: the recipe that ``oscar calibrate MODEL`` cached for this model."""
    sink: int = Field(default=64, ge=0)
    """First tokens of a request that are also kept unquantized, a multiple of 16."""
    recent: int = Field(default=256, ge=0)
    """Last tokens of a request that are also kept unquantized, a multiple of 16."""

    @field_validator("sink", "recent")
    @classmethod
    def _whole_blocks(cls, tokens: int) -> int:
        if tokens % WINDOW_TOKENS:
            raise ValueError(f"must be a multiple of {WINDOW_TOKENS} (the tokens of one window block)")
        return tokens

    @classmethod
    def from_additional_config(cls, additional: Any) -> Self:
        """Read ``VllmConfig.additional_config``.

        Raises:
            OscarConfigError: in one sentence, for an unknown or wrong option or a misspelt "oscar" key.
        """
        if not isinstance(additional, dict):
            raise OscarConfigError(
                f'additional_config must be a JSON object such as {{"{KEY}": {{"sink": 64}}}}, '
                f"not a {type(additional).__name__}"
            )
        others = {str(key).lower(): key for key in additional if key != KEY}
        near = difflib.get_close_matches(KEY, others, cutoff=0.6)
        if near:
            raise OscarConfigError(f'additional_config has no option "{others[near[0]]}"; did you mean "{KEY}"?')
        section = additional.get(KEY, {})
        if not isinstance(section, dict):
            raise OscarConfigError(f'"{KEY}" in additional_config must be a JSON object, not {section!r}')
        try:
            return cls(**{str(name): value for name, value in section.items()})
        except ValidationError as error:
            problem = error.errors()[0]
            name = ".".join(str(part) for part in problem["loc"])
            if problem["type"] == "extra_forbidden":
                known = ", ".join(cls.model_fields)
                raise OscarConfigError(f'unknown oscar option "{name}"; the options are {known}') from None
            reason = problem["msg"].removeprefix("Value error, ")
            raise OscarConfigError(
                f'oscar option "{name}": {reason[:1].lower()}{reason[1:]}, got {problem["input"]!r}'
            ) from None
