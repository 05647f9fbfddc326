"""An engine's configuration with OSCAR, and the sentence that it is refused with."""

from typing import Any

import pytest
from pydantic import ValidationError
from vllm import EngineArgs

HADAMARD = {"oscar": {"recipe": "hadamard"}}


def configure(model: str, additional: Any = HADAMARD, **flags: Any) -> Any:
    args = EngineArgs(
        model=model,
        attention_backend="OSCAR",
        skip_tokenizer_init=True,
        additional_config=additional,
        **flags,
    )
    return args.create_engine_config()


def refusal(kind: type[Exception], model: str, additional: Any = HADAMARD, **flags: Any) -> str:
    """The sentence that an engine is refused with."""
    with pytest.raises(ValidationError) as caught:
        configure(model, additional, **flags)
    (problem,) = caught.value.errors()
    error = problem["ctx"]["error"]
    assert type(error) is kind
    return str(error)
