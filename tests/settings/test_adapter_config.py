"""What a plan reads in a config of PEFT's own, against the installed PEFT."""

import importlib.util
import json

import peft

from autotrain_mem.settings import adapter_config as module
from autotrain_mem.settings.adapter_config import arguments_of, needs_data_first, says_more_than_flags


def test_what_a_config_leaves_out_is_pefts_default_and_not_trls() -> None:
    said = {"peft_config": '{"peft_type": "LORA"}', "use_peft": True}
    assert arguments_of('{"peft_type": "LORA"}') == said | {"lora_r": 8, "lora_alpha": 8, "lora_dropout": 0.0}
    plain = peft.LoraConfig()
    assert {key: getattr(plain, key) for key, _ in module._FLAGS.values()} == dict(module._FLAGS.values())


def test_a_saved_config_is_trained_as_the_same_that_was_not_saved() -> None:
    saved = peft.IA3Config(target_modules=["q_proj"], feedforward_modules=[], inference_mode=True).to_dict()
    text = module.canonical({**saved, "target_modules": ["q_proj"], "feedforward_modules": [], "peft_type": "IA3"})
    assert json.loads(text) == {
        **{"peft_type": "IA3", "target_modules": ["q_proj"], "feedforward_modules": []},
        **{"fan_in_fan_out": False, "init_ia3_weights": True},
    }


def test_kinds_are_those_of_the_installed_peft() -> None:
    kinds = {kind.value for kind in peft.PeftType}
    assert {*module._PLAIN_WEIGHTS, *module.UNREHEARSED} <= kinds
    for kind in module._PLAIN_WEIGHTS:  # those with layers for bitsandbytes' weights have a module of that name
        assert importlib.util.find_spec(f"peft.tuners.{kind.lower()}.bnb") is None


def test_a_plan_is_kept_from_what_a_kind_cannot() -> None:
    for kind in ("LOKR", "BOFT", "PREFIX_TUNING", "IA3"):
        said = arguments_of(json.dumps({"peft_type": kind}))
        assert (said.get("load_in_4bit") is False) is (kind in ("LOKR", "BOFT"))
        assert (said.get("gradient_checkpointing") is False) is (kind == "PREFIX_TUNING")


def test_first_values_that_need_weights_or_data_are_told_and_names_are_those_of_papers() -> None:
    pissa, eva = ('{"peft_type": "LORA", "init_lora_weights": "' + start + '"}' for start in ("pissa_niter_4", "eva"))
    assert "computes the adapter from weights" in module.why_not_quantized(pissa)
    assert not needs_data_first(pissa)
    assert needs_data_first(eva) in vars(peft)
    assert [module.name_of(f'{{"peft_type": "{kind}"}}') for kind in ("VERA", "LN_TUNING")] == ["VeRA", "LN TUNING"]


def test_only_what_flags_cannot_say_needs_the_config() -> None:
    assert not says_more_than_flags('{"peft_type": "LORA", "r": 4, "use_dora": true}')
    assert says_more_than_flags('{"peft_type": "LORA", "init_lora_weights": "pissa"}')
    assert says_more_than_flags('{"peft_type": "VERA"}')
    kept = {"peft_config": "{}", "max_length": 5}
    assert module.without_said({**kept, "lora_r": 8}) == kept
    assert module.without_said({"lora_r": 8}) == {"lora_r": 8}
