"""A worker, reduced to its block tables and to the tokens that every cache row stands for.

The tables are append-only, as vLLM's are, with the ids of freed blocks in them. Every row that a reader would look at
must hold the very tokens of its request.
"""

import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from vllm.v1.request import Request

from oscar_vllm.cache.window import OscarWindowSpec, window_spec

HISTORY, WINDOW = 0, 1
BLOCK = (128, 16)
MAX_LEN = 1024


@dataclass(frozen=True)
class Setting:
    """What an engine is started with."""

    sink: int = 64
    recent: int = 256
    drafts: int = 0
    """Speculative tokens a step verifies."""
    lookahead: int = 0
    """Slots a drafter with a cache of its own asks for beyond those."""
    eagle: bool = False
    asynchronous: bool = False
    """Schedule a step before the outputs of the one before it are known."""
    caching: bool = True
    spare: int = 200
    """Pool blocks beyond those that one request of MAX_LEN tokens needs."""

    def window(self) -> OscarWindowSpec:
        return window_spec(
            num_kv_heads=1,
            head_size=64,
            dtype=torch.bfloat16,
            sink=self.sink,
            recent=self.recent,
            lookahead=max(self.drafts, self.lookahead),
            steps_in_flight=2 if self.asynchronous else 1,
        )


@dataclass
class Sequence:
    """One request: vLLM's view of it, and the worker's."""

    request: Request
    max_tokens: int
    tables: tuple[list[int], list[int]] = ([], [])
    """The worker's block ids of each group: only ever appended to while the request runs."""
    computed: int = 0
    """Tokens that the worker has computed and kept."""
    tokens: list[int] = field(default_factory=list)
    """All tokens that the worker knows."""
    pending: list[tuple[int, int, list[int]]] = field(default_factory=list)
    """Outputs the scheduler has not seen: (tokens scheduled, drafts rejected, new tokens)."""
    keys: list[int] = field(default_factory=list)
    """For every token a number that stands for it and all tokens before it; as many as were asked for."""

    def prefix_keys(self, drafts: list[int]) -> np.ndarray:
        """[tokens + drafts] numbers that stand for all tokens up to a position."""
        self.keys += chain_keys(self.keys[-1] if self.keys else 0, self.tokens[len(self.keys) :])
        return np.array(self.keys + chain_keys(self.keys[-1], drafts), dtype=np.int64)


def chain_keys(key: int, tokens: list[int]) -> list[int]:
    """A number for each token, of it and what ``key`` stands for."""
    return [key := hash((key, token)) for token in tokens]


class Worker:
    """Writes and reads rows of the cache as attention does; of each it remembers the tokens that it stands for."""

    def __init__(self, setting: Setting, blocks: int, groups: Any) -> None:
        self.setting = setting
        self.groups = groups  # of the block pool: they know whose a block is
        self.rows = np.zeros((blocks, BLOCK[HISTORY]), dtype=np.int64)
        self.row_group = np.full(blocks, -1)
        self.random = random.Random(0)

    def draft(self) -> list[int]:
        return [self.random.randrange(100, 103) for _ in range(self.setting.drafts)]

    def execute(self, scheduled: list[tuple[Sequence, int]], accept: float) -> None:
        """Compute so many tokens of each request; ``accept`` of the drafts turn out right."""
        steps = []
        for sequence, new in scheduled:
            request = sequence.request
            known = len(sequence.tokens) - sequence.computed
            drafts = [] if new < known else (self.draft() if self.setting.asynchronous else request.spec_token_ids)
            drafts = drafts[: max(0, new - known)]
            new = min(new, known + len(drafts))
            steps.append((sequence, new, drafts, sequence.prefix_keys(drafts)))
        for sequence, new, _, keys in steps:
            self._write(sequence, sequence.computed, sequence.computed + new, keys)
        for sequence, new, _, keys in steps:
            self._read(sequence, sequence.computed, sequence.computed + new, keys)
        for (sequence, new, drafts, _), (_, planned) in zip(steps, scheduled, strict=True):
            request = sequence.request
            accepted = next((i for i in range(len(drafts)) if self.random.random() >= accept), len(drafts))
            prefilling = sequence.computed + new < len(sequence.tokens)
            tokens = [] if prefilling else [*drafts[:accepted], self.random.randrange(103, 106)]
            rejected = 0 if prefilling else planned - (new - len(drafts)) - accepted
            sequence.computed += new - (0 if prefilling else len(drafts) - accepted)
            sequence.tokens += tokens
            sequence.pending.append((planned, rejected, tokens))
            request.num_computed_tokens += planned
            request.num_in_flight_tokens += planned
            if self.setting.asynchronous and not prefilling:
                request.num_output_placeholders += 1 + len(request.spec_token_ids)
                request.spec_token_ids = [-1] * self.setting.drafts

    def _write(self, sequence: Sequence, computed: int, length: int, keys: np.ndarray) -> None:
        positions = np.arange(computed, length)
        for group, size in enumerate(BLOCK):
            ids = np.asarray(sequence.tables[group])[positions // size]
            at = ids != 0
            assert group == WINDOW or at.all()
            for block in set(ids[at].tolist()):
                if self.row_group[block] != group:  # the groups overlay the same bytes
                    self.rows[block], self.row_group[block] = 0, group
            self.rows[ids[at], positions[at] % size] = keys[positions[at]]

    def _read(self, sequence: Sequence, computed: int, length: int, keys: np.ndarray) -> None:
        """Look at every row that attention of this step reads.

        Each token has its own window, so that the first one reads the most from there and the last one the least.
        """
        positions = np.arange(length)
        ids = np.asarray(sequence.tables[WINDOW])[positions // 16]

        def windowed(token: int) -> np.ndarray:
            """Which positions the window holds for the query at position ``token``."""
            inside = (positions < self.setting.sink) | (positions >= token - self.setting.recent)
            return inside & (ids != 0)

        for group, at in ((WINDOW, windowed(computed)), (HISTORY, ~windowed(length - 1))):
            where = positions[at]
            blocks = np.asarray(sequence.tables[group])[where // BLOCK[group]]
            table = self.groups[group].req_to_blocks[sequence.request.request_id]
            owned = np.array([block.block_id for block in table])
            assert (owned[where // BLOCK[group]] == blocks).all()
            assert (self.row_group[blocks] == group).all()
            assert (self.rows[blocks, where % BLOCK[group]] == keys[where]).all()
