"""The window manager inside vLLM's own KV cache manager, coordinator and block pool.

A scheduler and a worker, reduced to what touches blocks, run random schedules. The worker keeps what vLLM's keeps: an
append-only block table with the ids of freed blocks in it. Every cache row that a reader would look at must hold the
very tokens of its request.
"""

import os
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request, RequestStatus

from oscar_vllm.cache.spec import history_spec
from oscar_vllm.cache.window import OscarWindowManager, OscarWindowSpec, window_spec

HISTORY, WINDOW = 0, 1
BLOCK = (128, 16)
MAX_LEN = 1024
init_none_hash(sha256)


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


def prefix_keys(tokens: list[int]) -> np.ndarray:
    """[len(tokens)] a number for every position that stands for all tokens up to it."""
    keys, key = np.empty(len(tokens), dtype=np.int64), 0
    for position, token in enumerate(tokens):
        key = hash((key, token))
        keys[position] = key
    return keys


class Engine:
    """Schedules as vLLM's scheduler does, and remembers which tokens every cache row holds."""

    def __init__(self, setting: Setting = Setting()) -> None:
        self.setting = setting
        dense = FullAttentionSpec(block_size=128, num_kv_heads=1, head_size=64, dtype=torch.bfloat16)
        history, self.spec = history_spec(dense), setting.window()
        assert history.page_size_bytes == self.spec.page_size_bytes == 5120
        self.blocks = 1 + MAX_LEN // 128 + min(MAX_LEN // 16, self.spec.max_real_blocks) + setting.spare
        config = KVCacheConfig(
            num_blocks=self.blocks,
            kv_cache_tensors=[],
            kv_cache_groups=[KVCacheGroupSpec(["layer"], history), KVCacheGroupSpec(["layer.window"], self.spec)],
        )
        self.manager = KVCacheManager(
            config,
            max_model_len=MAX_LEN,
            scheduler_block_size=128,
            hash_block_size=16,
            max_in_flight_tokens=512,
            enable_caching=setting.caching,
            use_eagle=setting.eagle,
        )
        self.pool = self.manager.block_pool
        self.groups = self.manager.coordinator.single_type_managers
        self.hasher = get_request_block_hasher(16, sha256)
        self.running: list[Sequence] = []
        self.waiting: list[Sequence] = []
        self.rows = np.zeros((self.blocks, 128), dtype=np.int64)
        self.row_group = np.full(self.blocks, -1)
        self.random = np.random.default_rng(0)
        self.count = 0
        self.preemptions = 0
        self.hits: list[int] = []
        """Tokens of each admission that the prefix cache had."""

    # The scheduler

    def add(self, prompt: list[int], max_tokens: int = 1) -> Sequence:
        self.count += 1
        parameters = SamplingParams(max_tokens=max_tokens)
        request = Request(f"r{self.count}", prompt, parameters, None, block_hasher=self.hasher)
        sequence = Sequence(request, max_tokens, tokens=list(prompt))
        self.waiting.append(sequence)
        return sequence

    def preempt(self) -> None:
        """Take the blocks of the request that was admitted last."""
        victim = self.running.pop()
        self.manager.free(victim.request)
        victim.request.status = RequestStatus.PREEMPTED
        victim.request.num_computed_tokens = 0
        victim.request.num_output_placeholders = 0
        victim.request.spec_token_ids = []
        self.waiting.insert(0, victim)
        self.preemptions += 1

    def finish(self, sequence: Sequence) -> None:
        sequence.request.status = RequestStatus.FINISHED_ABORTED
        if sequence in self.running:
            self.manager.free(sequence.request)
            self.running.remove(sequence)
        else:
            self.waiting.remove(sequence)

    def step(self, chunk: int = MAX_LEN, accept: float = 0.5) -> None:
        """One step of at most ``chunk`` tokens a request; ``accept`` of the drafts turn out right."""
        scheduled: list[tuple[Sequence, int]] = []
        preempted = False
        for sequence in list(self.running):
            if sequence not in self.running:
                continue
            request = sequence.request
            if (
                request.num_output_placeholders
                and request.num_computed_tokens + 2 - request.num_output_placeholders
                >= request.num_prompt_tokens + sequence.max_tokens
            ):
                continue  # what is in flight ends this request
            new = request.num_tokens_with_spec + request.num_output_placeholders - request.num_computed_tokens
            new = min(new, chunk)
            if new < request.num_tokens + request.num_output_placeholders - request.num_computed_tokens:
                request.spec_token_ids = []
            while True:
                blocks = self.manager.allocate_slots(request, new, num_lookahead_tokens=self.setting.lookahead)
                if blocks is not None or len(self.running) == 1:
                    break
                preempted = True
                self.preempt()
                if sequence not in self.running:
                    break
            if sequence not in self.running:
                break
            assert blocks is not None, "a request alone in the pool must always go on"
            for table, ids in zip(sequence.tables, blocks.get_block_ids(), strict=True):
                table.extend(ids)
            scheduled.append((sequence, new))
        while self.waiting and not preempted:
            sequence = self.waiting[0]
            request = sequence.request
            hit, hit_tokens, _ = self.manager.get_computed_blocks(request)
            new = min(request.num_tokens - hit_tokens, chunk)
            blocks = self.manager.allocate_slots(
                request,
                new,
                num_new_computed_tokens=hit_tokens,
                new_computed_blocks=hit,
                num_lookahead_tokens=self.setting.lookahead,
                full_sequence_must_fit=True,
                has_scheduled_reqs=bool(self.running),
            )
            if blocks is None:
                assert self.running, "a request alone in the pool must be admitted"
                break
            self.waiting.pop(0)
            self.running.append(sequence)
            self.hits.append(hit_tokens)
            request.status = RequestStatus.RUNNING
            request.num_computed_tokens = sequence.computed = hit_tokens
            assert sequence.tokens == list(request.all_token_ids)
            history, window = self.manager.get_block_ids(request.request_id)
            sequence.tables = (list(history), list(window))
            scheduled.append((sequence, new))
        before = {id(sequence): len(sequence.pending) for sequence in self.running + self.waiting}
        self._execute(scheduled, accept)
        for sequence in self.running + self.waiting:
            self._receive_all(sequence, keep=len(sequence.pending) - before[id(sequence)])

    def settle(self) -> None:
        """Let the scheduler learn every output in flight."""
        for sequence in list(self.running):
            self._receive_all(sequence, keep=0)

    def _receive_all(self, sequence: Sequence, keep: int) -> None:
        keep = keep if self.setting.asynchronous else 0
        while len(sequence.pending) > keep and not sequence.request.is_finished():
            self._receive(sequence)

    def _receive(self, sequence: Sequence) -> None:
        """The scheduler learns the output of one step."""
        request = sequence.request
        scheduled, rejected, tokens = sequence.pending.pop(0)
        request.num_in_flight_tokens -= scheduled
        stale = request.status == RequestStatus.PREEMPTED  # its tokens count, its counters were reset
        if not stale:
            request.num_computed_tokens -= rejected
            request.num_output_placeholders = max(0, request.num_output_placeholders - rejected - len(tokens))
        for token in tokens:
            request.append_output_token_ids(token)
            if request.num_output_tokens >= sequence.max_tokens:
                self.finish(sequence)
                return
        if not stale:
            cached = request.num_computed_tokens - request.num_output_placeholders
            if self.setting.asynchronous:
                self.manager.cache_blocks(request, cached)
            elif tokens:
                request.spec_token_ids = self._drafts()

    # The worker

    def _drafts(self) -> list[int]:
        return [int(token) for token in self.random.integers(100, 103, self.setting.drafts)]

    def _execute(self, scheduled: list[tuple[Sequence, int]], accept: float) -> None:
        steps = []
        for sequence, new in scheduled:
            request = sequence.request
            known = len(sequence.tokens) - sequence.computed
            drafts = [] if new < known else (self._drafts() if self.setting.asynchronous else request.spec_token_ids)
            drafts = drafts[: max(0, new - known)]
            new = min(new, known + len(drafts))
            steps.append((sequence, new, drafts, prefix_keys(sequence.tokens + drafts)))
        for sequence, new, _, keys in steps:
            self._write(sequence, sequence.computed, sequence.computed + new, keys)
        for sequence, new, _, keys in steps:
            self._read(sequence, sequence.computed, sequence.computed + new, keys)
        for (sequence, new, drafts, _), (_, planned) in zip(steps, scheduled, strict=True):
            request = sequence.request
            accepted = int((self.random.random(len(drafts)) < accept).cumprod().sum())
            prefilling = sequence.computed + new < len(sequence.tokens)
            tokens = [] if prefilling else [*drafts[:accepted], int(self.random.integers(103, 106))]
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
            for block in np.unique(ids[at]):
                if self.row_group[block] != group:  # the groups overlay the same bytes
                    self.rows[block], self.row_group[block] = 0, group
            self.rows[ids[at], positions[at] % size] = keys[positions[at]]

    def _read(self, sequence: Sequence, computed: int, length: int, keys: np.ndarray) -> None:
        """Look at every row that attention of this step reads."""
        positions = np.arange(length)
        ids = np.asarray(sequence.tables[WINDOW])[positions // 16]
        inside = (positions < self.setting.sink) | (positions >= computed - self.setting.recent)
        windowed = inside & (ids != 0)
        for group, at in ((WINDOW, windowed), (HISTORY, ~windowed)):
            where = positions[at]
            blocks = np.asarray(sequence.tables[group])[where // BLOCK[group]]
            owned = self.groups[group].req_to_blocks[sequence.request.request_id]
            index = np.unique(where // BLOCK[group])
            assert [owned[i].block_id for i in index] == [sequence.tables[group][i] for i in index]
            assert (self.row_group[blocks] == group).all()
            assert (self.rows[blocks, where % BLOCK[group]] == keys[where]).all()

    # What must hold between steps

    def check(self) -> None:
        owners: dict[int, set[tuple[int, int]]] = {}
        counts: dict[int, int] = {}
        sinks = self.setting.sink // 16
        for group, manager in enumerate(self.groups):
            assert set(manager.req_to_blocks) == {sequence.request.request_id for sequence in self.running}
            for table in manager.req_to_blocks.values():
                real = [(index, block) for index, block in enumerate(table) if not block.is_null]
                for index, block in real:
                    owners.setdefault(block.block_id, set()).add((group, index))
                    counts[block.block_id] = counts.get(block.block_id, 0) + 1
                    if group == WINDOW:
                        assert index < sinks or block.block_hash is None, "only sink blocks are cached"
                if group == WINDOW:
                    assert len(real) <= self.spec.max_real_blocks
        for block, places in owners.items():
            assert len(places) == 1, "a block serves one place of one group"
            assert self.pool.blocks[block].ref_cnt == counts[block]
            assert counts[block] == 1 or self.pool.blocks[block].block_hash is not None
        assert self.pool.get_num_free_blocks() == self.blocks - 1 - len(owners)

    def drain(self) -> None:
        """Run until every request is done."""
        for _ in range(5000):
            if not self.running and not self.waiting:
                break
            self.step()
            self.check()
        assert not self.running
        assert not self.waiting
        assert self.pool.get_num_free_blocks() == self.blocks - 1


def text(base: int, length: int) -> list[int]:
    return [(base * 31 + position * position) % 97 for position in range(length)]


class Schedules(RuleBasedStateMachine):
    """Random schedules; the checks are the engine's."""

    @initialize(
        windows=st.sampled_from([(64, 256), (16, 32), (0, 0), (32, 0), (0, 48), (160, 16)]),
        drafts=st.sampled_from([0, 0, 3, 20]),
        drafter=st.sampled_from(["none", "lookahead", "eagle"]),
        asynchronous=st.booleans(),
        caching=st.sampled_from([True, True, False]),
        spare=st.integers(0, 30),
    )
    def start(
        self,
        windows: tuple[int, int],
        drafts: int,
        drafter: str,
        asynchronous: bool,
        caching: bool,
        spare: int,
    ) -> None:
        self.engine = Engine(
            Setting(
                *windows,
                drafts=drafts,
                lookahead=drafts if drafter != "none" else 0,
                eagle=drafter == "eagle" and drafts > 0,
                asynchronous=asynchronous,
                caching=caching,
                spare=spare,
            )
        )

    @rule(
        base=st.integers(0, 1),
        shared=st.sampled_from([0, 15, 64, 129, 300, 520]),
        own=st.one_of(st.integers(1, 40), st.sampled_from([128, 200, 350])),
        max_tokens=st.integers(1, 40),
    )
    def add(self, base: int, shared: int, own: int, max_tokens: int) -> None:
        tail = [1000 + self.engine.count] * own
        self.engine.add(text(base, shared) + tail, max_tokens)

    @rule(chunk=st.sampled_from([1, 5, 16, 100, 256, 512, MAX_LEN]), accept=st.sampled_from([0.0, 0.5, 1.0]))
    def step(self, chunk: int, accept: float) -> None:
        self.engine.step(chunk, accept)

    @rule(steps=st.integers(2, 12), accept=st.sampled_from([0.0, 0.5, 1.0]))
    def run(self, steps: int, accept: float) -> None:
        for _ in range(steps):
            self.engine.step(MAX_LEN, accept)
            self.engine.check()

    @precondition(lambda self: self.engine.running)
    @rule()
    def preempt(self) -> None:
        self.engine.settle()
        if self.engine.running:
            self.engine.preempt()

    @precondition(lambda self: self.engine.running or self.engine.waiting)
    @rule(which=st.integers(0, 20))
    def abort(self, which: int) -> None:
        everyone = self.engine.running + self.engine.waiting
        self.engine.finish(everyone[which % len(everyone)])

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "engine"):
            self.engine.check()

    def teardown(self) -> None:
        if hasattr(self, "engine"):
            self.engine.drain()


TestSchedules = Schedules.TestCase
TestSchedules.settings = settings(
    max_examples=int(os.environ.get("OSCAR_SCHEDULES", "200")),
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)


# What one request or two do


def window_blocks(engine: Engine, sequence: Sequence) -> list[int]:
    """Indices of the real window blocks of a running request."""
    table = engine.groups[WINDOW].req_to_blocks[sequence.request.request_id]
    return [index for index, block in enumerate(table) if not block.is_null]


def test_a_second_request_hits_whole_pages_and_gets_its_sinks() -> None:
    engine = Engine()
    first = engine.add(text(0, 600))
    engine.step()
    sinks = [block.block_id for block in engine.pool.blocks if block.block_hash and block.block_id in first.tables[1]]
    second = engine.add(text(0, 600), max_tokens=2)
    engine.step()
    assert engine.hits == [0, 512]
    assert second.tables[HISTORY][:4] == first.tables[HISTORY][:4]
    assert second.tables[WINDOW][:4] == first.tables[WINDOW][:4]
    assert sorted(second.tables[WINDOW][:4]) == sorted(sinks)
    assert second.tables[WINDOW][4:32] == [0] * 28, "the rest of a hit is read from INT2"
    assert all(second.tables[WINDOW][32:])
    engine.drain()


def test_only_sink_blocks_enter_the_prefix_cache() -> None:
    engine = Engine()
    engine.add(text(0, 600), max_tokens=40)
    engine.drain()
    groups = {0: 0, 1: 0}
    for block in engine.pool.blocks:
        if block.block_hash is not None:
            groups[int.from_bytes(block.block_hash[-4:], "big")] += 1
    assert groups == {HISTORY: 4, WINDOW: 4}


@pytest.mark.parametrize("block", range(4))
def test_a_hit_needs_every_sink_block(block: int) -> None:
    engine = Engine()
    first = engine.add(text(0, 600))
    engine.step()
    engine.manager.evict_blocks({first.tables[WINDOW][block]})
    engine.add(text(0, 600))
    engine.step()
    assert engine.hits == [0, 0]
    assert engine.pool.get_num_free_blocks() == engine.blocks - 1


def test_a_hit_is_as_long_as_its_history() -> None:
    engine = Engine()
    first = engine.add(text(0, 600))
    engine.step()
    engine.manager.evict_blocks({first.tables[HISTORY][2]})
    engine.add(text(0, 600))
    engine.step()
    assert engine.hits == [0, 256]


def test_a_hit_inside_the_sinks_brings_the_sinks_it_covers() -> None:
    engine = Engine(Setting(sink=160, recent=16))
    first = engine.add(text(0, 130))
    engine.step()
    second = engine.add(text(0, 128) + text(5, 72), max_tokens=2)
    engine.step()
    assert engine.hits == [0, 128]
    assert second.tables[WINDOW][:8] == first.tables[WINDOW][:8]
    assert window_blocks(engine, second) == [*range(10), 11, 12]
    engine.drain()


def test_a_prompt_in_chunks_keeps_sinks_and_the_window_of_the_next_step() -> None:
    engine = Engine()
    sequence = engine.add(text(0, 1000), max_tokens=20)
    engine.step(chunk=600)
    assert window_blocks(engine, sequence) == [0, 1, 2, 3, *range((600 - 256) // 16, 38)]
    engine.step(chunk=350)
    assert window_blocks(engine, sequence) == [0, 1, 2, 3, *range((600 - 256) // 16, 38), *range(43, 60)]
    engine.step()
    assert window_blocks(engine, sequence) == [0, 1, 2, 3, *range((950 - 256) // 16, 63)]
    engine.drain()


def test_steady_decode_holds_21_window_blocks() -> None:
    engine = Engine()
    sequence = engine.add(text(0, 900), max_tokens=60)
    engine.step()
    engine.step()
    held = set()
    for _ in range(50):
        engine.step()
        held.add(len(window_blocks(engine, sequence)))
    assert held == {21}


@pytest.mark.parametrize(("sink", "recent"), [(0, 0), (32, 0), (0, 32)], ids=["none", "sink only", "recent only"])
def test_windows_of_zero(sink: int, recent: int) -> None:
    engine = Engine(Setting(sink=sink, recent=recent))
    first = engine.add(text(0, 500), max_tokens=40)
    engine.step(chunk=300)
    engine.step()
    if recent == 0:
        # Nothing is left of the window but the sinks and the block being filled.
        engine.step()
        assert window_blocks(engine, first)[: sink // 16] == list(range(sink // 16))
        assert len(window_blocks(engine, first)) <= sink // 16 + 1
    engine.add(text(0, 500))
    engine.step()
    assert engine.hits == [0, 384], "without sinks the history alone makes a hit"
    engine.drain()


def test_preempted_requests_resume_and_leak_nothing() -> None:
    engine = Engine(Setting(spare=12))
    for base in range(6):
        engine.add(text(base, 100), max_tokens=300)
    engine.drain()
    assert engine.preemptions > 0


def test_a_resumed_request_hits_its_own_prefix() -> None:
    engine = Engine()
    engine.add(text(0, 600), max_tokens=8)
    engine.step()
    engine.preempt()
    engine.drain()
    assert engine.hits == [0, 512]


def test_a_resumed_request_gives_up_passed_blocks_as_a_new_one_does() -> None:
    held = []
    for preempted in (False, True):
        engine = Engine(Setting(caching=False))
        sequence = engine.add(text(0, 1000), max_tokens=20)
        if preempted:
            engine.step(chunk=500)
            engine.step(chunk=400)
            engine.preempt()
        for _ in range(4):
            engine.step(chunk=200)
            held.append(window_blocks(engine, sequence))
        engine.drain()
    assert held[:4] == held[4:]


def test_recent_blocks_do_not_crowd_out_a_cached_prefix() -> None:
    """An old prefix of 512 tokens outlives unrelated requests as long as the pool holds their pages and sinks."""
    engine = Engine(Setting(spare=40))
    engine.add(text(0, 600))
    engine.drain()
    for base in range(1, 6):
        engine.add(text(base, 600))
        engine.drain()
    engine.add(text(0, 600))
    engine.drain()
    assert engine.hits[-1] == 512


def test_the_manager_is_the_registered_one() -> None:
    engine = Engine()
    assert type(engine.groups[WINDOW]) is OscarWindowManager


def test_a_hit_is_admitted_wherever_the_cold_prompt_is() -> None:
    """In a pool for one longest request: counting the sinks of a hit twice would keep it waiting for ever."""
    engine = Engine(Setting(sink=160, recent=16, spare=0))
    engine.add(text(0, 130))
    engine.drain()
    engine.add(text(0, 129) + [1000] * 800)
    engine.step(chunk=128)
    assert engine.hits == [0, 128]
    engine.drain()


def test_slots_for_a_drafter_count_in_every_step() -> None:
    engine = Engine(Setting(sink=0, recent=0, lookahead=20))
    sequence = engine.add(text(0, 351))
    engine.step(chunk=1)
    assert window_blocks(engine, sequence) == [0, 1]
    engine.step(chunk=349)
    assert window_blocks(engine, sequence) == [0, 1, 21, 22, 23]
    assert engine.spec.max_real_blocks >= 5
