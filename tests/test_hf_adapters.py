"""PEFT adapters that act on a call's input, and not on weights: decoded as `generate` decodes them, or refused."""

from __future__ import annotations

import pytest
import torch

from selfspec.errors import UnsupportedModelError
from selfspec.hf import SelfSpeculative
from tests.models import build
from tests.target import load

peft = pytest.importorskip("peft")
pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Position ids are not supported:UserWarning"),
]
NEW, VIRTUAL = 12, {"num_virtual_tokens": 4}
IDS = torch.randint(3, 96, (1, 9), generator=torch.Generator().manual_seed(0))
VIRTUAL_TOKENS = {
    "PromptTuningConfig": VIRTUAL,
    "PrefixTuningConfig": VIRTUAL,
    "PromptEncoderConfig": VIRTUAL,
    "MultitaskPromptTuningConfig": {**VIRTUAL, "num_tasks": 2},
    "CPTConfig": {"cpt_token_ids": [5, 6, 7], "cpt_mask": [1] * 3, "cpt_tokens_type_mask": [1, 2, 3]},
    "CartridgeConfig": VIRTUAL,
}
OF_WEIGHTS = {
    "LoraConfig": {"r": 4},
    "AdaptionPromptConfig": {"adapter_len": 4, "adapter_layers": 2},
    "IA3Config": {"feedforward_modules": []},
    "OFTConfig": {},
}


def adapted(kind, seed=0, **options):
    """A tiny llama with an adapter that has an effect."""
    if not hasattr(peft, kind):
        pytest.skip(f"this PEFT has no {kind}")
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        base = build("llama", eos_token_id=None, pad_token_id=0)
        model = peft.get_peft_model(base, getattr(peft, kind)(task_type="CAUSAL_LM", **options)).eval()
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.7)
    return model


def ours(model, ids=IDS, **options):
    return theirs(model, ids, custom_generate=SelfSpeculative(2, 3), **options)


def theirs(model, ids=IDS, **options):
    asked = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "max_new_tokens": NEW, "do_sample": False}
    return model.generate(**asked, **options)[:, -NEW:].tolist()


@pytest.mark.parametrize("kind", VIRTUAL_TOKENS)
def test_virtual_tokens_are_refused_and_the_model_goes_on(kind):
    model = adapted(kind, **VIRTUAL_TOKENS[kind])
    task = {"task_ids": torch.tensor([1])} if kind.startswith("Multitask") else {}
    wanted = theirs(model, **task)
    for _ in range(2):
        with pytest.raises(
            UnsupportedModelError, match=r"virtual tokens .*; decode it with generate\(\) without custom"
        ):
            ours(model, **task)
        with pytest.raises(UnsupportedModelError, match=r"virtual tokens .*; decode it with the PEFT model's own"):
            load(model)
    assert theirs(model, **task) == wanted
    base = model.get_base_model()
    assert ours(base) == theirs(base) != wanted  # what PEFT set for its call is gone


def test_without_its_virtual_tokens_the_model_is_served():
    model = adapted("PromptTuningConfig", **VIRTUAL)
    with model.disable_adapter():
        assert ours(model) == theirs(model)


@pytest.mark.parametrize("kind", OF_WEIGHTS)
def test_adapters_of_weights_are_served(kind):
    model = adapted(kind, **OF_WEIGHTS[kind])
    wanted = theirs(model)
    assert ours(model) == wanted != theirs(build("llama", eos_token_id=None, pad_token_id=0))
    assert load(model).generate(IDS, max_tokens=NEW, exit_layer=2)[0].token_ids == wanted[0]


def test_invocation_tokens_are_refused():
    model = adapted(
        "LoraConfig", r=4, target_modules=["q_proj", "v_proj"], alora_invocation_tokens=IDS[0, 4:6].tolist()
    )
    wanted = theirs(model)
    with pytest.raises(UnsupportedModelError, match=r"acts on calls and not on weights.*without custom_generate"):
        ours(model)
    with pytest.raises(UnsupportedModelError, match=r"invocation tokens \(aLoRA\) acts on calls"):
        load(model)
    assert theirs(model) == wanted != theirs(model.get_base_model())


@pytest.mark.parametrize(
    ("kind", "options"), [("LoraConfig", {"r": 4}), ("RoadConfig", {"target_modules": ["q_proj"], "group_size": 8})]
)
def test_an_adapter_per_row_is_refused_and_one_for_all_is_served(kind, options):
    model, ids = adapted(kind, **options), IDS.repeat(2, 1)
    wanted = theirs(model, ids, adapter_names=["default", "__base__"])
    assert wanted[0] != wanted[1]
    with pytest.raises(
        UnsupportedModelError, match=r"_adapter_names.* acts on calls.*use one adapter of weights for all"
    ):
        ours(model, ids, adapter_names=["default", "__base__"])
    assert theirs(model, ids, adapter_names=["default", "__base__"]) == wanted
    assert ours(model, ids) == theirs(model, ids) == [wanted[0]] * 2


def test_a_routing_by_task_is_refused():
    model = adapted("PolyConfig", r=2, n_tasks=2, target_modules=["q_proj", "v_proj"])
    tasks = {"task_ids": torch.tensor([1])}
    wanted = theirs(model, **tasks)
    with pytest.raises(UnsupportedModelError, match="acts on calls"):
        ours(model, **tasks)
    with pytest.raises(UnsupportedModelError, match=r"POLY, .* acts on calls"):
        load(model)
    assert theirs(model, **tasks) == wanted


def test_hooks_that_are_an_adapters_own_are_refused_and_stay():
    model = adapted("ShadowConfig")
    wanted = theirs(model)
    for call in (ours, load):
        with pytest.raises(UnsupportedModelError, match="acts on calls"):
            call(model)
    assert theirs(model) == wanted


def test_a_mixture_chosen_by_each_call_is_refused(tmp_path):
    adapted("LoraConfig", r=2, target_modules=["q_proj"]).save_pretrained(tmp_path)
    base = build("llama", eos_token_id=None, pad_token_id=0)
    base.config.use_cache = False
    config = peft.XLoraConfig(
        task_type="CAUSAL_LM", hidden_size=32, xlora_depth=1, adapters={"0": str(tmp_path), "1": str(tmp_path)}
    )
    model = peft.get_peft_model(base, config).eval()
    with pytest.raises(UnsupportedModelError, match="acts on calls"):
        ours(model)
    with pytest.raises(UnsupportedModelError, match=r"XLORA, .* acts on calls"):
        load(model)


def test_an_adapter_from_a_folder_is_refused_likewise(tmp_path):
    model = adapted("PromptTuningConfig", **VIRTUAL)
    model.save_pretrained(tmp_path / "adapter")
    model.get_base_model().save_pretrained(tmp_path / "model")
    with pytest.raises(UnsupportedModelError, match="virtual tokens"):
        load(str(tmp_path / "model"), adapter=str(tmp_path / "adapter"))
