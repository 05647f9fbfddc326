"""What the window manager does for one request or two, inside vLLM's own KV cache manager and block pool."""

import pytest
from block_engine import Engine, text
from block_worker import HISTORY, WINDOW, Sequence, Setting

from oscar_vllm.cache import window
from oscar_vllm.cache.window import OscarWindowManager


def window_blocks(engine: Engine, sequence: Sequence) -> list[int]:
    """Indices of the real window blocks of a running request."""
    table = engine.groups[WINDOW].req_to_blocks[sequence.request.request_id]
    return [index for index, block in enumerate(table) if not block.is_null]


def test_a_second_request_hits_whole_pages_and_gets_its_sinks() -> None:
    engine = Engine()
    first = engine.add(text(0, 600))
    engine.step()
    sinks = [block.block_id for block in engine.pool.blocks if block.block_hash and block.block_id in first.tables[1]]
    second = engine.add(text(0, 600) + text(5, 300), max_tokens=2)
    engine.step()
    assert engine.hits == [0, 512]
    assert second.tables[HISTORY][:4] == first.tables[HISTORY][:4]
    assert second.tables[WINDOW][:4] == first.tables[WINDOW][:4]
    assert sorted(second.tables[WINDOW][:4]) == sorted(sinks)
    assert second.tables[WINDOW][4:32] == [0] * 28, "the rest of a hit is read from INT2"
    assert all(second.tables[WINDOW][(900 - 256) // 16 :])
    engine.drain()


@pytest.mark.parametrize(
    ("shared", "own", "hit"),
    [(600, 0, 256), (512, 1, 256), (512, 255, 384), (512, 256, 512), (512, 400, 512), (383, 0, 0), (384, 0, 128)],
)
def test_a_hit_leaves_the_recent_window_to_be_computed(shared: int, own: int, hit: int) -> None:
    """The last 256 tokens of a prompt have unquantized copies, whatever of them is cached."""
    engine = Engine()
    engine.add(text(0, shared))
    engine.step()
    second = engine.add(text(0, shared) + text(5, own), max_tokens=2)
    again = engine.manager.coordinator.find_longest_cache_hit(second.request.block_hashes, hit)
    assert again[1] == hit, "what came out, asked for again, stays"
    engine.step()
    assert engine.hits == [0, hit]
    assert all(second.tables[WINDOW][(shared + own - 256) // 16 :])
    engine.drain()


def test_a_long_hit_is_taken_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(window, "REFRESHED_HIT", 512)
    engine = Engine()
    engine.add(text(0, 900))
    engine.step()
    for tokens in (600, 700):
        engine.add(text(0, tokens))
        engine.step()
    assert engine.hits == [0, 256, 640]
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
    assert engine.hits == [0, 256]


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
    engine.add(text(0, 600) + text(9, 300))
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
