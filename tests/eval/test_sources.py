"""Names of policies: what `adaptive` may draft from stands behind a colon, joined by +."""

from __future__ import annotations

import pytest

from eval.run.names import FORMS, parse_method
from eval.sources import split_policy
from selfspec.control.plan import DRAFTS
from selfspec.control.registry import POLICIES


def test_every_policy_and_some_sources_of_drafts_are_names():
    assert [split_policy(name) for name in POLICIES] == [(name, None) for name in POLICIES]
    assert split_policy("adaptive:exit") == ("adaptive", ("exit",))
    assert split_policy("adaptive:tree+lookup") == ("adaptive", ("tree", "lookup"))
    told = parse_method("adaptive:" + "+".join(DRAFTS))
    assert (told.kind, told.options, told.is_ours) == ("adaptive", DRAFTS, True)
    assert all(parse_method(form) for form in FORMS if form.startswith("adaptive"))


@pytest.mark.parametrize(
    "name", ["best", "adaptive:", "adaptive:exits", "adaptive:exit+", "adaptive:exit+exit", "adaptive:tree", "del:exit"]
)
def test_other_names_are_refused_with_what_there_is(name):
    with pytest.raises(ValueError, match=r"policies must be among adaptive, plain, .* adaptive:exit or .*, got '"):
        split_policy(name)
    with pytest.raises(ValueError, match="is unknown"):
        parse_method(name)
