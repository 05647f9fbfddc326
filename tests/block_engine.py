"""A scheduler, reduced to what touches blocks, around vLLM's own KV cache manager and block pool, and its worker."""

import torch
from block_worker import MAX_LEN, WINDOW, Sequence, Setting, Worker
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request, RequestStatus

from oscar_vllm.cache.spec import history_spec

DEFAULT = Setting()
init_none_hash(sha256)


class Engine:
    """Schedules as vLLM's scheduler does."""

    def __init__(self, setting: Setting = DEFAULT) -> None:
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
        self.worker = Worker(setting, self.blocks, self.groups)
        self.count = 0
        self.preemptions = 0
        self.hits: list[int] = []
        """Tokens of each admission that the prefix cache had."""

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
        self.worker.execute(scheduled, accept)
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
                request.spec_token_ids = self.worker.draft()

    # What must hold between steps

    def check(self) -> None:
        places: dict[int, tuple[int, int]] = {}
        counts: dict[int, int] = {}
        sinks = self.setting.sink // 16
        for group, manager in enumerate(self.groups):
            assert set(manager.req_to_blocks) == {sequence.request.request_id for sequence in self.running}
            for table in manager.req_to_blocks.values():
                real = [(index, block) for index, block in enumerate(table) if not block.is_null]
                for index, block in real:
                    place = places.setdefault(block.block_id, (group, index))
                    assert place == (group, index), "a block serves one place of one group"
                    counts[block.block_id] = counts.get(block.block_id, 0) + 1
                    if group == WINDOW:
                        assert index < sinks or block.block_hash is None, "only sink blocks are cached"
                if group == WINDOW:
                    assert len(real) <= self.spec.max_real_blocks
        for block, count in counts.items():
            assert self.pool.blocks[block].ref_cnt == count
            assert count == 1 or self.pool.blocks[block].block_hash is not None
        assert self.pool.get_num_free_blocks() == self.blocks - 1 - len(counts)

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
