"""What tests of the prefix cache share: prompts that begin alike, and an audit of its pages."""

from __future__ import annotations

from selfspec.decoding.request import Request
from selfspec.executors.pick import Sampling
from tests.helpers import make_prompts


def request(prompt, max_new_tokens=12, **options):
    sampling = {name: options.pop(name) for name in list(options) if name in Sampling.__dataclass_fields__}
    return Request(prompt, max_new_tokens, Sampling(**sampling), eos=frozenset(), **options)


def family(dice, depth=3):
    """A prompt of parts that other prompts of the family begin with, too."""
    parts = [make_prompts([length], seed=at)[0] for at, length in enumerate((17, 33, 5, 16, 9, 40))]
    return [token for _ in range(dice.randint(1, depth)) for token in dice.choice(parts)]


def audit_shared(engine):
    """Every page is free, known or held; what several rows hold is written, and none of them writes to it."""
    holders = {}
    for row in engine.rows:
        assert len({*row.pages}) == len(row.pages)
        for at, page in enumerate(row.pages):
            holders.setdefault(page, []).append((row, at))
    assert engine.num_pages_in_use == len(holders) <= engine.cache.num_pages - engine.cache.num_free_pages
    size = engine.cache.page_size
    for places in holders.values():
        texts = {tuple(row.content[: (at + 1) * size]) for row, at in places}
        assert len(places) == 1 or len(texts) == 1
        assert len(places) == 1 or all((at + 1) * size <= row.num_cached for row, at in places)


def finished(engine, audit=audit_shared):
    """All completions, once nothing is left to do, by request id."""
    done, steps = {}, 0
    while engine.has_work:
        assert (steps := steps + 1) < 500, "the engine makes no progress"
        for round_ in engine.step():
            done |= {row.request_id: row.completion for row in round_.rows if row.completion is not None}
        audit(engine)
    assert engine.num_pages_in_use == 0 and not engine.rows
    return done
