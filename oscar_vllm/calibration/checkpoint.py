"""Where an interrupted calibration goes on: the sums of every rank, and how much of which text they have seen."""

import json
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

_STATE = "state.json"
_NAMES = {"model": "model", "text": "text", "sequence": "length of prompts", "ranks": "number of ranks"}


class CheckpointError(ValueError):
    """A folder that this calibration cannot go on from; the message is one sentence."""


@dataclass(frozen=True)
class Identity:
    """What must be equal for sums to be added to each other."""

    model: str
    """Its name and a hash of its weights and geometry."""
    text: str
    """Its hash."""
    sequence: int
    """Tokens of one prompt."""
    ranks: int
    """Workers, each with a file of its own."""


class Checkpoint:
    """A folder with the sums after some whole prompts. Each state is written beside the last and replaces it at once,
    so that an interruption at any moment leaves one that is whole."""

    def __init__(self, folder: Path, identity: Identity) -> None:
        self.folder = folder
        self.identity = identity

    @classmethod
    def open(cls, folder: Path, identity: Identity, tokens: int) -> tuple[Self, int]:
        """The checkpoint in a folder, new or not, and the tokens that it has seen.

        Args:
            folder: made if it is missing.
            identity: of the calibration that wants to go on.
            tokens: how many it wants to see.

        Raises:
            CheckpointError: the folder holds another calibration, or one that has seen more.
        """
        folder.mkdir(parents=True, exist_ok=True)
        checkpoint = cls(folder, identity)
        state = checkpoint._read()
        if state is None:
            return checkpoint, 0
        if state["identity"] != asdict(identity):
            differing = next(k for k, v in asdict(identity).items() if state["identity"].get(k) != v)
            raise CheckpointError(
                f"The folder {folder} holds a calibration with another {_NAMES[differing]}; give another --resume "
                "folder."
            )
        if state["tokens"] > tokens:
            raise CheckpointError(
                f"The calibration in {folder} has seen {state['tokens']} tokens, more than the {tokens} asked for; ask "
                "for at least as many or give another --resume folder."
            )
        return checkpoint, int(state["tokens"])

    def place(self, tokens: int) -> Path:
        """The folder of the rank files after so many tokens."""
        return self.folder / f"tokens-{tokens}"

    def save(self, tokens: int, write: Callable[[str], object]) -> None:
        """Let ``write(folder)`` put down the rank files, then make them the state to go on from."""
        before, place = self._read(), self.place(tokens)
        shutil.rmtree(place, ignore_errors=True)  # what an interrupted save left
        place.mkdir()
        write(str(place))
        new = self.folder / f"{_STATE}.new"
        new.write_text(json.dumps({"identity": asdict(self.identity), "tokens": tokens}))
        new.replace(self.folder / _STATE)
        if before is not None and before["tokens"] != tokens:
            shutil.rmtree(self.place(before["tokens"]), ignore_errors=True)

    def _read(self) -> dict[str, Any] | None:
        file = self.folder / _STATE
        try:
            state = json.loads(file.read_text())
            whole = isinstance(state["identity"], dict) and self.place(int(state["tokens"])).is_dir()
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError):
            whole = False
        if not whole:
            raise CheckpointError(f"{file} is damaged; remove the folder or give another --resume folder.")
        return dict(state)
