"""Around `generate` and the model: stop strings, streamers, replaced forwards, autocast, offloading, copies."""

from __future__ import annotations

import copy
import functools
import pickle
import types

import accelerate
import pytest
import torch
from tokenizers import Regex, Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from selfspec import SamplingParams
from selfspec.errors import UnsupportedModelError
from selfspec.hf import SelfSpeculative
from tests.models import EOS, build
from tests.target import load
from tests.test_hf import Recorder, batch

PAD, NEW = 0, 14


@pytest.fixture(scope="module")
def tokenizer():
    letters = "abcdefghij"
    words = {letters[i // 10] + letters[i % 10]: i for i in range(96)}
    made = Tokenizer(WordLevel(words, unk_token="aa"))
    made.pre_tokenizer, made.decoder = Split(Regex("[a-j]{2}"), "isolated"), Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=made)


@pytest.fixture
def llama():
    model = build("llama", pad_token_id=PAD)
    model.generation_config.update(pad_token_id=PAD, eos_token_id=EOS)
    return model


def theirs(model, **options):
    return model.generate(**batch((9, 4, 12)), max_new_tokens=NEW, do_sample=False, **options).tolist()


def ours(model, spec=None, **options):
    return theirs(model, custom_generate=spec or SelfSpeculative(2, 3), **options)


# ---------------------------------------------------------------------------------------------- stop strings, streamers


def stops_of(model, tokenizer):
    """A text across two tokens of the first row's output, and one within a token of the second's."""
    rows = [tokenizer.convert_ids_to_tokens(row[12:]) for row in theirs(model, eos_token_id=None)]
    return [rows[0][3][1] + rows[0][4][0], rows[1][6]]


@pytest.mark.parametrize("eos", [EOS, None])
def test_stop_strings_are_generates(llama, tokenizer, eos):
    several = stops_of(llama, tokenizer)
    for stops in (several, tuple(several), several[0]):
        told = list(stops) if isinstance(stops, tuple) else stops
        wanted, got = Recorder(), Recorder()
        expected = theirs(llama, eos_token_id=eos, stop_strings=told, tokenizer=tokenizer, streamer=wanted)
        spec = SelfSpeculative(3, 5, stop_strings=stops, tokenizer=tokenizer, streamer=got)
        assert ours(llama, spec, eos_token_id=eos) == expected
        assert (got.puts, got.ends) == (wanted.puts, 1)
        if eos is not None:  # else rows run on until all of them have ended
            assert "stop" in {completion.finish_reason for completion in spec.completions}
            assert expected != theirs(llama)


def test_stop_strings_need_their_tokenizer(tokenizer):
    with pytest.raises(ValueError, match=r"stop_strings needs the tokenizer .*; pass tokenizer=\.\.\. too"):
        SelfSpeculative(stop_strings=["x"])
    for wrong in ("", [""], 3, [3]):
        with pytest.raises(ValueError, match="stop_strings must hold non-empty texts, got"):
            SelfSpeculative(stop_strings=wrong, tokenizer=tokenizer)


def test_a_streamer_that_is_none_is_refused():
    with pytest.raises(ValueError, match="streamer must have put and end, as transformers' have, got 3"):
        SelfSpeculative(streamer=3)


# ---------------------------------------------------------------------------------------------------- replaced forwards


def compiled(module):
    module.forward = torch.compile(module.forward, backend="eager")


@pytest.mark.parametrize(
    "change",
    [
        compiled,
        lambda model: setattr(model, "model", torch.compile(model.model, backend="eager")),
        lambda model: compiled(model.model),
        lambda model: [compiled(layer) for layer in model.model.layers],
        lambda model: compiled(model.model.layers[1].mlp),
        lambda model: model.compile(backend="eager"),
    ],
    ids=["model", "base wrapped", "base", "layers", "mlp", "compile()"],
)
def test_what_torch_compiled_of_a_forward_is_served(llama, change):
    wanted = theirs(llama)
    change(llama)
    before = {name: dict(vars(module)) for name, module in llama.named_modules()}
    assert ours(llama) == wanted
    done = load(llama).generate([batch((9, 4, 12))["input_ids"][2].tolist()], max_tokens=NEW)[0].token_ids
    assert done == [token for token in wanted[2][12:] if token != PAD]
    assert {name: dict(vars(module)) for name, module in llama.named_modules()} == before


def halved(module, *args, honest=None, **kwargs):
    out = honest(*args, **kwargs)
    out.logits = out.logits.roll(1, -1)
    return out


def wrapped(module):
    honest = module.forward

    @functools.wraps(honest)
    def louder(*args, **kwargs):
        return honest(*args, **kwargs)

    module.forward = louder


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            wrapped,
            r"^forward of the model was replaced by .*, which cannot be split; remove it with del \(model.forward",
        ),
        (lambda model: wrapped(model.model), "^forward of model was replaced by "),
        (lambda model: wrapped(model.model.layers[2]), r"^forward of model\.layers\.2 was replaced by "),
        (
            lambda model: setattr(model, "forward", functools.partial(halved, model, honest=model.forward)),
            "^forward of the model was replaced by .*halved, which cannot be split",
        ),
        (
            lambda model: setattr(model, "forward", types.MethodType(type(model).forward, model)),
            "^forward of the model was replaced by ",
        ),
    ],
)
def test_other_replaced_forwards_are_refused_by_name_and_the_model_goes_on(llama, change, sentence):
    change(llama)
    wanted = theirs(llama)
    before = {name: dict(vars(module)) for name, module in llama.named_modules()}
    for call in (ours, load):
        with pytest.raises(UnsupportedModelError, match=sentence) as refusal:
            call(llama)
        assert "\n" not in str(refusal.value)
    assert theirs(llama) == wanted
    assert {name: dict(vars(module)) for name, module in llama.named_modules()} == before


def test_a_method_in_place_of_a_parts_forward_is_served(llama):
    def doubled(self, x):
        return 2 * type(self).forward(self, x)

    plain = theirs(llama)
    part = llama.model.layers[1].mlp
    part.forward = types.MethodType(doubled, part)
    assert ours(llama) == theirs(llama) != plain


def test_a_forward_that_is_replaced_later_is_noticed(llama):
    spec, target, ids = SelfSpeculative(2, 3), load(llama), batch((9,))["input_ids"]
    wanted, [loaded] = ours(llama, spec), target.generate(ids, max_tokens=2)
    wrapped(llama.model.layers[0])
    for call in (lambda: ours(llama, spec), lambda: target.generate(ids)):
        with pytest.raises(UnsupportedModelError, match="was replaced"):
            call()
    del llama.model.layers[0].forward
    assert ours(llama, spec) == wanted
    assert target.generate(ids, max_tokens=2)[0].token_ids == loaded.token_ids


def test_a_replaced_preparation_of_inputs_is_refused(llama):
    llama.prepare_inputs_for_generation = functools.partial(llama.prepare_inputs_for_generation)
    with pytest.raises(UnsupportedModelError, match="prepare_inputs_for_generation was replaced by"):
        ours(llama)
    del llama.prepare_inputs_for_generation
    assert ours(llama) == theirs(llama)


# ------------------------------------------------------------------------------------------------- autocast, offloading


def test_autocast_is_refused_by_name_on_every_path(llama):
    target, spec, ids = load(llama), SelfSpeculative(2, 3), batch((9,))["input_ids"]
    wanted = ours(llama, spec)
    stream = target.llm().stream(ids, SamplingParams(max_tokens=NEW))
    with torch.autocast("cpu", torch.bfloat16):
        for call in (
            lambda: ours(llama),
            lambda: ours(llama, spec),
            lambda: load(llama),
            lambda: target.generate(ids),
            lambda: next(stream),
        ):
            with pytest.raises(ValueError, match=r"torch.autocast must be off, got autocast to bfloat16 on cpu; call"):
                call()
    with torch.autocast("cpu", torch.bfloat16, enabled=False):
        assert ours(llama, spec) == wanted == theirs(llama)


def on_disk(model, tmp_path):
    model.save_pretrained(tmp_path / "model")
    rest = ("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head")
    places = {f"model.layers.{i}": "disk" if i > 1 else "cpu" for i in range(4)} | dict.fromkeys(rest, "cpu")
    return AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", device_map=places, offload_folder=tmp_path / "offloaded"
    )


@pytest.mark.parametrize("way", ["cpu", "disk"])
def test_offloaded_weights_are_refused_by_name_and_the_model_goes_on(llama, way, tmp_path):
    wanted = theirs(llama)
    model = on_disk(llama, tmp_path) if way == "disk" else accelerate.cpu_offload(llama, execution_device="cpu")
    for call in (ours, load):
        with pytest.raises(
            UnsupportedModelError, match=r"offloaded by accelerate.*; load the whole model onto one device"
        ):
            call(model)
    assert theirs(model) == wanted


def test_weights_that_were_never_loaded_are_refused():
    config = build("llama").config
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(UnsupportedModelError, match="on the meta device"):
        load(model)


# --------------------------------------------------------------------------------------------------------------- copies

COPIES = [copy.copy, copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))]
NAMES = ["copy", "deepcopy", "pickle"]


@pytest.mark.parametrize("copied", COPIES, ids=NAMES)
def test_a_copied_target_decodes_likewise_and_by_itself(llama, tokenizer, copied):
    target, ids = load(llama, tokenizer, backend="views"), batch((9,))["input_ids"]
    wanted = target.generate(ids, max_tokens=NEW)[0]
    other = copied(target)
    assert other.backend == "views" and (other.model is llama) == (copied is copy.copy)
    got = other.generate(ids, max_tokens=NEW)[0]
    assert (got.token_ids, got.text) == (wanted.token_ids, wanted.text)
    with torch.no_grad():
        llama.lm_head.weight.neg_()
    changed = target.generate(ids, max_tokens=NEW)[0].token_ids
    after = other.generate(ids, max_tokens=NEW)[0].token_ids
    assert changed != wanted.token_ids and after == (changed if copied is copy.copy else wanted.token_ids)


@pytest.mark.parametrize("copied", COPIES, ids=NAMES)
def test_a_copied_loop_decodes_likewise(llama, tokenizer, copied):
    spec = SelfSpeculative(3, 4, stop_strings=stops_of(llama, tokenizer), tokenizer=tokenizer)
    wanted = ours(llama, spec)
    other = copied(spec)
    assert [one.token_ids for one in other.completions] == [one.token_ids for one in spec.completions]
    assert other.stats == spec.stats
    assert ours(llama, other) == wanted
