"""Structured outputs through every executor: speculation changes no token, and plain decoding is a plain loop's."""

from __future__ import annotations

import json
import re
from functools import cache

import pytest
import torch
from jsonschema import validate

from selfspec import LLM, SamplingParams, StructuredOutputs
from selfspec.control.adaptive import Adaptive
from selfspec.control.plan import GRAMMAR, ShadowPlan
from selfspec.core import LOOKUP, Request
from selfspec.kernels.pick import scored
from tests.decoding.test_greedy import tokens_of
from tests.executors.requests import engine_of, every_executor, most_executors, programs, target
from tests.executors.test_conformance import same_layers, seen_of
from tests.helpers import Adversary, Always, Run, Schedule, audit_cache
from tests.slow import slow
from tests.structured.grammars import ASKED, EOS, PERSON, judge_of
from tests.where_drafts_pay import where_drafts_pay

MOST = 40
RECORDED = ("cuda", "fused")  # there, layers draft nothing for rows with grammars
SAMPLINGS = ({}, {"temperature": 0.9, "top_p": 0.9, "seed": 5}, {"temperature": 1.2, "top_k": 30, "seed": 6})
POLICIES = {
    "random": lambda: Schedule(0, 4),
    "programs": lambda: Adversary(1, 4, most_rounds=20, eager=0.2),
    "fixed": lambda: Always(2, 4, num_rounds=9),
    "lookup": lambda: Always(LOOKUP, 4, num_rounds=9),
    "forced": lambda: Always(None, 0, num_rounds=9, most_forced=16),
    "forced and layers": lambda: Always(2, 4, num_rounds=9, most_forced=2),
    "adaptive": lambda: Adaptive(where_drafts_pay()),
}


def params_of(name, sampling=(), **more):
    settings = {"max_tokens": MOST, "structured_outputs": ASKED[name], **dict(sampling), **more}
    return SamplingParams(**settings)


def prompt_of(at):
    """Of whole characters, since an output goes on with what a prompt leaves unfinished."""
    return target("eager").tokenizer("what may it be? " * 2)["input_ids"][at : 5 + 3 * at]


@torch.inference_mode()
def plain_loop(model, prompt, params):
    """Whole forwards, masks by a fresh matcher at every token, and why the output ends."""
    judge, output = judge_of(params.structured_outputs), []
    while len(output) < params.max_tokens:
        allowed, has_ended = judge.after(output)
        if has_ended or EOS in output:
            return output, "stop"
        logits = model(torch.tensor([[*prompt, *output]])).logits[0, -1].float()
        kept = torch.full_like(logits, -torch.inf)
        kept[allowed] = logits[allowed]
        position = torch.tensor([len(prompt) + len(output)])
        output.append(int(scored(kept[None], [params], position).argmax()))
    return output, "stop" if judge.after([t for t in output if t != EOS])[1] or EOS in output else "length"


def outputs_of(kind, policy, several, audit=None, **options):
    """What requests come to that are decoded together."""
    run = Run(engine_of(kind, policy, **options), audit)
    for prompt, params in several:
        run.add(Request(prompt, params, frozenset([EOS])))
    return run.finish().outputs


@every_executor
def test_plain_decoding_is_a_loop_over_masked_logits_of_transformers(kind):
    several = [(prompt_of(i), params_of(name, SAMPLINGS[i % 3])) for i, name in enumerate(ASKED)]
    done = outputs_of(kind, "plain", several)
    for (prompt, params), output in zip(several, done, strict=True):
        assert (output.token_ids, output.finish_reason) == plain_loop(target(kind).model, prompt, params)
    assert {output.finish_reason for output in done} == {"stop", "length"}


@cache
def with_plain(kind):
    """Constrained and free requests, and what each alone comes to without drafts."""
    several = [(prompt_of(i), params_of(one, SAMPLINGS[(i + 1) % 3])) for i, one in enumerate(ASKED)]
    several += [(prompt_of(i), SamplingParams(max_tokens=30, seed=i, temperature=i % 2)) for i in range(3)]
    return several, [outputs_of(kind, "plain", [one])[0] for one in several]


@most_executors
@pytest.mark.parametrize("name", POLICIES)
def test_whatever_drafts_gives_the_tokens_of_plain_decoding_beside_free_rows(kind, name):
    several, plain = with_plain(kind)
    policy = POLICIES[name]()
    done = outputs_of(kind, policy, several, audit_cache if kind == "eager" else None, max_num_seqs=4)
    assert tokens_of(done) == tokens_of(plain)
    assert [one.finish_reason for one in done] == [one.finish_reason for one in plain]
    assert [one.text for one in done] == [one.text for one in plain]
    drafts = name != "fixed" or kind not in RECORDED
    assert (sum(one.stats.num_accepted_draft_tokens for one in done[: len(ASKED)]) > 0) == drafts


@most_executors
def test_alone_too_and_with_penalties_and_log_probabilities(kind):
    for i, name in enumerate(ASKED):
        more = {"repetition_penalty": 1.3, "presence_penalty": 0.5, "logprobs": 2}
        several = [(prompt_of(i), params_of(name, SAMPLINGS[i % 3], **more))]
        plain, done = (outputs_of(kind, one, several) for one in ("plain", Adversary(i, 4, most_rounds=9, eager=0.2)))
        assert tokens_of(done) == tokens_of(plain)


@pytest.mark.parametrize("seed", [0, 1, slow(2), slow(3)])
def test_the_compiled_executor_runs_the_rounds_of_the_eager_one(seed):
    """With threads, too, which take the masks of all positions at once."""
    several = [(prompt_of(i), params_of(name, SAMPLINGS[(i + seed) % 3])) for i, name in enumerate(ASKED)]
    several += [(prompt_of(9), SamplingParams(max_tokens=30))]
    seen = []
    for is_eager in (False, True):
        policy = programs(seed, copies=False, eager=0.0)
        run = Run(same_layers(is_eager, policy, target("cpu"), max_num_seqs=4))
        for prompt, params in several:
            run.add(Request(prompt, params, frozenset([EOS])))
        outputs = run.finish().outputs
        seen.append((tokens_of(outputs), [seen_of(row) for row in policy.rows]))
    assert seen[0] == seen[1]
    assert sum(row.num_accepted for row in policy.rows) > 20


@most_executors
@pytest.mark.parametrize("num_rounds", [1, 20])
def test_forced_tokens_are_drafted_and_never_rejected(kind, num_rounds):
    asked = StructuredOutputs(json=PERSON, disable_any_whitespace=True)
    params = SamplingParams(max_tokens=60, temperature=1.0, structured_outputs=asked)
    [plain] = outputs_of(kind, "plain", [(prompt_of(1), params)])
    run = Run(engine_of(kind, Always(None, 0, num_rounds=num_rounds, most_forced=9)))
    run.add(Request(prompt_of(1), params, frozenset([EOS])))
    [output] = run.finish().outputs
    assert output.token_ids == plain.token_ids
    rows = [row for row in run.rows("0") if row.source == GRAMMAR]
    assert all(row.num_drafted == row.num_accepted == row.match_length for row in rows)
    assert max(row.num_drafted for row in rows) == 9, "a plan says how many"
    assert sum(row.num_drafted for row in rows) >= len('{"name":"' + '"kind":"')
    assert {round_.exit_layer for round_ in run.rounds if round_.rows} <= {None, LOOKUP}


@most_executors
def test_rows_that_opt_out_draft_no_forced_tokens_and_policies_see_no_such_round(kind):
    several = [
        (prompt_of(1), params_of("schema", speculative=False)),
        (prompt_of(1), params_of("schema")),
        (prompt_of(2), SamplingParams(max_tokens=30)),
    ]
    policy = Always(2, 3, num_rounds=4, most_forced=9)
    done = outputs_of(kind, policy, several)
    assert done[0].stats.num_draft_tokens == 0 < done[1].stats.num_draft_tokens
    assert done[0].token_ids == done[1].token_ids
    assert policy.rows and not any(row.source == GRAMMAR for row in policy.rows)


@most_executors
def test_shadow_picks_are_those_of_drafts_under_the_same_masks(kind):
    """A layer that is probed and then drafts, as if nothing else had changed, is right where the probe said so."""
    several = [(prompt_of(1), params_of("schema", {"temperature": 0.8, "seed": 3}))]
    probed = Always(None, 0, shadow=ShadowPlan((2,), (0,), 1, True))
    outputs_of(kind, probed, several)
    hits = [bool(row.shadow.hits[0, 0]) for row in probed.rows]
    drafted = Always(2, 1)
    outputs_of(kind, drafted, several)
    accepted, at = {}, 0
    for row in drafted.rows:
        accepted |= {at: row.num_accepted == 1} if row.num_drafted else {}
        at += len(row.token_ids)
    assert {at: hits[at] for at in accepted if at < len(hits)} == {
        at: own for at, own in accepted.items() if at < len(hits)
    }
    assert {*accepted.values()} == (set() if kind in RECORDED else {True, False})


def test_the_default_policy_drafts_forced_tokens_first():
    run = Run(engine_of("cpu", Adaptive(where_drafts_pay())))
    run.add(Request(prompt_of(1), params_of("schema"), frozenset([EOS])))
    run.finish()
    assert run.rows("0")[0].source == GRAMMAR


def texts_of(name, kind="cpu", **more):
    several = [(prompt_of(i), params_of(name, {"temperature": 1.5, "seed": i}, **more)) for i in range(6)]
    return outputs_of(kind, Always(2, 3), several)


def test_outputs_that_end_are_what_was_asked_for():
    for output in texts_of("schema", max_tokens=60):
        assert output.finish_reason == "stop"
        validate(json.loads(output.text), PERSON)
        assert re.fullmatch(r'\{"name":".*","kind":"\w+"\}', output.text), "no token comes after the last bracket"
    assert {output.text for output in texts_of("choice")} <= set(ASKED["choice"].choice)
    for output in texts_of("regex"):
        assert output.finish_reason == "length" or re.fullmatch(ASKED["regex"].regex, output.text)
    assert all(output.finish_reason == "length" for output in texts_of("schema", max_tokens=9))


def test_the_last_token_may_be_the_last_bracket():
    [whole] = outputs_of("eager", "plain", [(prompt_of(0), params_of("choice"))])
    for spare in (0, 3):
        params = params_of("choice", max_tokens=len(whole.token_ids) + spare)
        [output] = outputs_of("eager", "plain", [(prompt_of(0), params)])
        assert (output.text, output.finish_reason) == (whole.text, "stop")


def test_an_end_of_text_ends_it_even_where_that_is_ignored():
    params = params_of("regex", {"temperature": 1.0}, ignore_eos=True, max_tokens=60)
    for seed in range(9):
        [output] = outputs_of("eager", "plain", [(prompt_of(seed), params)])
        if output.finish_reason == "stop":
            break
    assert re.fullmatch(ASKED["regex"].regex, output.text)


def test_stop_strings_and_processors_hold_beside_a_grammar():
    [free] = outputs_of("eager", "plain", [(prompt_of(1), params_of("schema"))])
    [cut] = outputs_of("eager", Always(2, 3), [(prompt_of(1), params_of("schema", stop='","'))])
    assert cut.text == free.text.split('","')[0] and cut.stop_reason == '","'

    def no_letter(ids, logits):
        logits[:, byte("g")] = -torch.inf
        return logits

    params = params_of("schema", logits_processors=no_letter, max_tokens=60)
    [other] = outputs_of("eager", Always(2, 3), [(prompt_of(1), params)])
    assert json.loads(other.text)["kind"] != "green"


def byte(letter):
    return target("eager").tokenizer(letter)["input_ids"][0]


@most_executors
def test_a_row_with_nothing_left_to_pick_ends_alone_and_says_why(kind):
    def only_z(ids, logits):
        kept = logits.clone()
        kept[:, byte("z") + 1 :] = kept[:, : byte("z")] = -torch.inf
        return kept

    run = Run(engine_of(kind, Always(2, 3)))
    wrong = run.add(Request(prompt_of(1), params_of("choice", logits_processors=only_z)))
    right = run.add(Request(prompt_of(2), params_of("choice")))
    with pytest.raises(ValueError, match="structured_outputs or tools allows no token that is left to pick"):
        run.finish(check=False)
    run.finish(check=False)
    assert run.output(wrong).finish_reason == "abort"
    assert run.output(right).text in ASKED["choice"].choice


def test_what_cannot_be_honoured_is_refused_when_it_is_asked_for():
    llm = LLM(target("eager").model, tokenizer=target("eager").tokenizer, backend="views")
    with pytest.raises(ValueError, match=r"structured_outputs.json is refused by llguidance: Unimplemented keys"):
        llm.generate("a", SamplingParams(structured_outputs=StructuredOutputs(json={"not": {}})))
    asked = SamplingParams(structured_outputs=StructuredOutputs(choice=["yes", "no"]), n=3, temperature=1.0)
    [output] = llm.generate("a", asked)
    assert {one.text for one in output.outputs} <= {"yes", "no"}
