"""Statistics that a model is stored with: what plain decoding shows of every layer, and whom they are for."""

from __future__ import annotations

import json

import pytest
import torch

from selfspec.calibrate import profile
from selfspec.model.exit_heads import ExitHeads
from tests.helpers import make_prompts, tokens_of
from tests.models import build, tiny
from tests.target import Target, load
from train.prior import Watch


def watched(target, **options):
    watch = Watch(target.split.num_layers)
    done = target.generate(make_prompts((9, 5)), policy=watch, max_tokens=20, **options)
    return watch, tokens_of(done)


@pytest.mark.parametrize("options", [{}, {"temperature": 0.8, "seed": 3}])
def test_watching_changes_no_token_and_counts_every_layer_at_every_position(options):
    target = tiny("llama")
    watch, tokens = watched(target, **options)
    assert tokens == [
        c.token_ids for c in target.generate(make_prompts((9, 5)), policy="plain", max_tokens=20, **options)
    ]
    assert (watch.tracker.overall.sum((0, 2)) > 0.9 * 40).all()


def test_the_layer_before_the_last_is_right_more_often_where_the_last_does_nothing():
    model = build("llama")
    with torch.no_grad():
        for name, weight in model.model.layers[-1].named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                weight.zero_()
    state = watched(Target(model))[0].tracker.state()
    assert sum(state["misses"][-1]) == 0 and sum(state["hits"][-1]) > 30
    assert sum(state["misses"][0]) > 0


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("SELFSPEC_CACHE", str(tmp_path / "cache"))
    build("llama").save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_a_stored_prior_is_where_a_new_machine_starts(folder):
    state = watched(load(folder))[0].tracker.state()
    assert load(folder).prior is None
    profile.store_prior(folder, load(folder).split, state)
    target = load(folder)
    assert target.prior == state
    own = {**state, "hits": (torch.tensor(state["hits"]) + 1).tolist()}
    target.prior = own
    target.save_prior()
    assert load(folder).prior == own  # what was seen on this machine comes first


@pytest.mark.parametrize("damage", ["{", '{"of": 1, "prior": {}}', "another depth", None])
def test_a_stored_prior_of_other_weights_or_none_at_all_is_passed_over(folder, damage):
    path = profile.store_prior(folder, load(folder).split, watched(load(folder))[0].tracker.state())
    if damage is None:
        with torch.no_grad():
            model = build("llama")
            model.model.embed_tokens.weight.mul_(2)
        model.save_pretrained(folder)
    elif damage == "another depth":
        whole = json.loads(path.read_text())
        whole["prior"]["hits"].pop()
        path.write_text(json.dumps(whole))
    else:
        path.write_text(damage)
    assert load(folder).prior is None


def test_the_embedded_model_has_them():
    assert load("demo").policies.stored_prior is not None


def test_other_exit_heads_are_not_what_the_statistics_are_of(folder):
    profile.store_prior(folder, load(folder).split, watched(load(folder))[0].tracker.state())
    target = load(folder)
    assert target.prior is not None
    target.exit_heads = ExitHeads([1], target.split.config.hidden_size, 2)
    assert target.prior is None
