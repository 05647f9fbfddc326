"""What every command shares: the consoles, and how an error that the user can mend is told."""

import functools
from collections.abc import Callable
from typing import ParamSpec

import typer
from pydantic import ValidationError
from rich.console import Console
from rich.markup import escape

console = Console()
errors = Console(stderr=True)

P = ParamSpec("P")


def _reason(error: Exception) -> str | None:
    """The one sentence for an error that the user can mend, None for any other."""
    from oscar_vllm.errors import EXPECTED

    if isinstance(error, ValidationError):  # raised by a check while vLLM built its configuration
        problem = error.errors()[0]
        return str(problem.get("ctx", {}).get("error") or problem["msg"])
    if isinstance(error, OSError):  # how transformers says that a model is not there
        return f"{error}"
    return str(error) if isinstance(error, EXPECTED) else None


def one_sentence(command: Callable[P, None]) -> Callable[P, None]:
    """End a command with one sentence on stderr and exit status 1 where the user can mend what went wrong."""

    @functools.wraps(command)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            command(*args, **kwargs)
        except Exception as error:
            reason = _reason(error)
            if reason is None:
                raise
            errors.print(f"[red]error:[/red] {escape(reason)}", soft_wrap=True, highlight=False)
            raise typer.Exit(1) from None

    return wrapped
