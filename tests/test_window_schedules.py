"""Random schedules of the window manager inside vLLM's own KV cache manager, coordinator and block pool.

A failing schedule is shrunk and printed as a script: the setting, and the operations in order.
"""

import os
from typing import Any, NamedTuple

import pytest
from block_engine import Engine, text
from block_worker import MAX_LEN, Setting
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from oscar_vllm.cache.window import OscarWindowManager

SCHEDULES = int(os.environ.get("OSCAR_SCHEDULES", "10000"))
LONGEST = 30
"""Operations of a schedule."""


class Add(NamedTuple):
    """A request arrives: ``shared`` tokens of one of two common texts, then ``own`` ones."""

    base: int
    shared: int
    own: int
    max_tokens: int

    def __call__(self, engine: Engine) -> None:
        engine.add(text(self.base, self.shared) + [1000 + engine.count] * self.own, self.max_tokens)


class Run(NamedTuple):
    """Some steps of at most ``chunk`` tokens a request, with a share of the drafts accepted."""

    steps: int
    chunk: int
    accept: float

    def __call__(self, engine: Engine) -> None:
        for _ in range(self.steps):
            engine.step(self.chunk, self.accept)
            engine.check()


class Preempt(NamedTuple):
    """The request admitted last loses its blocks."""

    def __call__(self, engine: Engine) -> None:
        engine.settle()
        if engine.running:
            engine.preempt()


class Abort(NamedTuple):
    """A request, running or waiting, is given up."""

    which: int

    def __call__(self, engine: Engine) -> None:
        everyone = engine.running + engine.waiting
        if everyone:
            engine.finish(everyone[self.which % len(everyone)])


LENGTHS = st.sampled_from([1, 2, 15, 16, 17, 33, 40, 128, 200, 350])
ADD = st.builds(Add, st.integers(0, 1), st.sampled_from([0, 15, 64, 129, 300, 520]), LENGTHS, st.integers(1, 40))
OPERATIONS = st.one_of(
    ADD,
    ADD,
    st.builds(Run, st.just(1), st.sampled_from([1, 5, 16, 100, 256, 512, MAX_LEN]), st.sampled_from([0.0, 0.5, 1.0])),
    st.builds(Run, st.integers(2, 12), st.just(MAX_LEN), st.sampled_from([0.0, 0.5, 1.0])),
    st.just(Preempt()),
    st.builds(Abort, st.integers(0, 20)),
)


@st.composite
def _settings(draw: Any) -> Setting:
    sink, recent = draw(st.sampled_from([(64, 256), (16, 32), (0, 0), (32, 0), (0, 48), (160, 16)]))
    drafts = draw(st.sampled_from([0, 0, 3, 20]))
    drafter = draw(st.sampled_from(["none", "lookahead", "eagle"])) if drafts else "none"
    return Setting(
        sink,
        recent,
        drafts=drafts,
        lookahead=drafts if drafter != "none" else 0,
        eagle=drafter == "eagle",
        asynchronous=draw(st.booleans()),
        caching=draw(st.sampled_from([True, True, False])),
        spare=draw(st.integers(0, 30)),
    )


SCRIPTS = st.integers(1, LONGEST).flatmap(lambda n: st.lists(OPERATIONS, min_size=n, max_size=n))
QUIET = settings(deadline=None, database=None, suppress_health_check=list(HealthCheck), print_blob=False)


def play(setting: Setting, script: list[Any]) -> Engine:
    """Run a schedule to its end, with every check after every operation."""
    engine = Engine(setting)
    for operation in script:
        operation(engine)
        engine.check()
    engine.drain()
    return engine


@settings(QUIET, max_examples=SCHEDULES)
@given(setting=_settings(), script=SCRIPTS)
def test_schedules(setting: Setting, script: list[Any]) -> None:
    play(setting, script)


def forget_to_free(monkeypatch: pytest.MonkeyPatch) -> None:
    pop = OscarWindowManager.pop_blocks_for_free
    monkeypatch.setattr(OscarWindowManager, "pop_blocks_for_free", lambda self, name: pop(self, name)[1:])


def free_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    remove = OscarWindowManager.remove_skipped_blocks

    def early(self: Any, name: str, computed: int, prompt: int | None = None) -> None:
        remove(self, name, computed + 16, prompt)

    monkeypatch.setattr(OscarWindowManager, "remove_skipped_blocks", early)


def share_without_holding(monkeypatch: pytest.MonkeyPatch) -> None:
    def add(self: Any, name: str, hit: list[Any], tokens: int, external: int) -> None:
        length = tokens // self.block_size
        self.req_to_blocks[name].extend([*hit[:length], *[self._null_block] * (length - len(hit))])
        self.num_cached_block[name] = length

    monkeypatch.setattr(OscarWindowManager, "add_local_computed_blocks", add)


def cache_recent_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    def mask(cls: Any, start_block: int, end_block: int, *args: Any, **options: Any) -> list[bool]:
        return [True] * (end_block - start_block)

    monkeypatch.setattr(OscarWindowManager, "reachable_block_mask", classmethod(mask))


@pytest.mark.parametrize(
    "plant",
    [forget_to_free, free_too_early, share_without_holding, cache_recent_blocks],
    ids=lambda plant: plant.__name__,
)
def test_a_planted_fault_shrinks_to_a_printed_script(monkeypatch: pytest.MonkeyPatch, plant: Any) -> None:
    plant(monkeypatch)

    @settings(QUIET, max_examples=500, derandomize=True, report_multiple_bugs=False)
    @given(setting=_settings(), script=SCRIPTS)
    def schedules(setting: Setting, script: list[Any]) -> None:
        play(setting, script)

    with pytest.raises(AssertionError) as caught:
        schedules()
    printed = "\n".join(caught.value.__notes__)
    assert "script=[" in printed
    assert "setting=Setting(" in printed
    assert 1 <= printed.count("Add(") <= 2
    assert sum(printed.count(f"{name}(") for name in ("Run", "Preempt", "Abort")) <= 3
