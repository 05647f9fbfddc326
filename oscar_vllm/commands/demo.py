"""``oscar demo``."""

from pathlib import Path
from typing import Annotated

import typer

from oscar_vllm.commands.common import console, one_sentence


@one_sentence
def demo(
    json: Annotated[Path | None, typer.Option(help="Also write the figures as JSON.")] = None,
    new_tokens: Annotated[int, typer.Option(min=16, help="Tokens to generate for the comparison.")] = 64,
) -> None:
    """Calibrate a small real model, answer a long prompt with the stock cache and with OSCAR, compare."""
    from oscar_vllm.demo.run import run_demo

    run_demo(console, json_path=json, new_tokens=new_tokens)
