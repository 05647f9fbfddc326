"""Where a calibration goes on: states that are whole at any moment, and folders that are refused."""

from dataclasses import replace
from pathlib import Path

import pytest

from oscar_vllm.calibration.checkpoint import Checkpoint, CheckpointError, Identity

IDENTITY = Identity(model="m-0123", text="abcd", sequence=2048, ranks=2)


def write(text: str, *, fail: bool = False):  # type: ignore[no-untyped-def]
    def ranks(folder: str) -> None:
        (Path(folder) / "rank-0.pt").write_text(text)
        if fail:
            raise KeyboardInterrupt
        (Path(folder) / "rank-1.pt").write_text(text)

    return ranks


def test_the_last_whole_state_counts(tmp_path: Path) -> None:
    checkpoint, seen = Checkpoint.open(tmp_path / "new", IDENTITY, 8192)
    assert seen == 0
    checkpoint.save(2048, write("a"))
    checkpoint.save(4096, write("b"))
    with pytest.raises(KeyboardInterrupt):
        checkpoint.save(6144, write("c", fail=True))
    again, seen = Checkpoint.open(tmp_path / "new", IDENTITY, 8192)
    assert seen == 4096
    assert {path.read_text() for path in again.place(seen).iterdir()} == {"b"}
    again.save(6144, write("c"))
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["state.json", "tokens-6144"]


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"model": "m-4567"}, "model"),
        ({"text": "ef"}, "text"),
        ({"sequence": 512}, "length of prompts"),
        ({"ranks": 1}, "number of ranks"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_sums_of_another_calibration_are_refused(tmp_path: Path, change: dict[str, object], what: str) -> None:
    Checkpoint.open(tmp_path, IDENTITY, 8192)[0].save(2048, write("a"))
    with pytest.raises(CheckpointError, match=f"holds a calibration with another {what}; give another --resume folder"):
        Checkpoint.open(tmp_path, replace(IDENTITY, **change), 8192)


def test_more_tokens_than_asked_for_are_refused(tmp_path: Path) -> None:
    Checkpoint.open(tmp_path, IDENTITY, 8192)[0].save(8192, write("a"))
    assert Checkpoint.open(tmp_path, IDENTITY, 16384)[1] == 8192
    with pytest.raises(CheckpointError, match="has seen 8192 tokens, more than the 4096 asked for"):
        Checkpoint.open(tmp_path, IDENTITY, 4096)


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "{}", '{"identity": {}, "tokens": 2048}', '{"identity": 1, "tokens": "x"}']
)
def test_a_damaged_state_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "state.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"state\.json is damaged; remove the folder"):
        Checkpoint.open(tmp_path, IDENTITY, 8192)
