"""Fills the dataclasses of TRL's parsers with the user's arguments, and derives a trainer's arguments from them."""

import dataclasses
import importlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from autotrain_mem.settings.adapter_config import LORA, PEFT_CONFIG, kind_of
from autotrain_mem.settings.words import without_maximized
from autotrain_mem.trainers.script_call import Keywords, is_adapted, quantization_of
from autotrain_mem.types.methods_table import METHODS

REHEARSED_ACCUMULATION = 2
"""The micro-steps per optimizer step in a rehearsal. The second runs with gradients allocated; a third adds nothing."""
REHEARSED_STEPS = 2
"""The optimizer steps in a rehearsal. Only the second runs with optimizer state allocated from its beginning."""
EVALUATED_BATCHES = 2
"""The batches of a rehearsed evaluation. The second runs while the results of the first are still allocated."""
LORA_TASK = {"lora_task_type": "SEQ_CLS"}
"""The LoRA task type for a model with a score head of one output."""


@dataclass(frozen=True, slots=True)
class Configs:
    """Holds the four filled dataclasses of TRL's parser for a method, in the parser's order, and our own settings."""

    script: Any
    training: Any
    model: Any
    dataset: Any
    processor: Any = None
    """The processor for rows with images in a real run. None: the trainer loads the tokenizer itself."""
    adapter: str | None = None
    """A PEFT config as JSON (``Knobs.peft_config``); None if TRL's flags describe the adapter."""
    prompt_length: int | None = None
    """The tokens of the longest prompt in a rehearsal; None if unknown."""
    answer_length: int | None = None
    """The tokens of the longest answer in a rehearsal; None if unknown."""

    @property
    def is_evaluated(self) -> bool:
        """Returns whether the trainer evaluates while it trains."""
        return str(getattr(self.training.eval_strategy, "value", self.training.eval_strategy)) != "no"


def script_parser(method: str) -> Any:
    """Returns TRL's own parser for ``trl METHOD``, with the program name ``autofit METHOD``."""
    return importlib.import_module(f"trl.scripts.{method}").make_parser(prog=f"autofit {method}")


def experimental_parser(method: str, training: type, script: type | None = None) -> Any:
    """Returns a TRL parser for a trainer of ``trl.experimental``, for which TRL has no script. ``training``: the
    trainer's config class. ``script``: the dataclass to use in place of TRL's ``ScriptArguments``."""
    from trl import DatasetMixtureConfig, ModelConfig, ScriptArguments, TrlParser

    kinds = (script or ScriptArguments, training, ModelConfig, DatasetMixtureConfig)
    return TrlParser(kinds, prog=f"autofit {method}")


def fill(make_parser: Callable[[], Any], arguments: Mapping[str, Any]) -> Configs:
    """Fills a parser's dataclasses from one flat mapping of their fields. Other names are ignored."""
    filled = Configs(*(_filled(kind, arguments) for kind in make_parser().dataclass_types))
    return dataclasses.replace(filled, adapter=arguments.get(PEFT_CONFIG))


def _filled(kind: Any, arguments: Mapping[str, Any]) -> Any:
    names = {field.name for field in dataclasses.fields(kind) if field.init}
    return kind(**{name: value for name, value in arguments.items() if name in names})


def build(trainer: str, filled: Configs, model: str, train_dataset: Any, eval_dataset: Any, stub: Any = None) -> Any:
    """Builds the installed trainer of this name as TRL's own script does."""
    import trl

    common = trainer_arguments(filled, model, stub)
    return getattr(trl, trainer)(train_dataset=train_dataset, eval_dataset=eval_dataset, **common)


def trainer_arguments(filled: Configs, model: str, stub: Any) -> dict[str, Any]:
    """Returns the arguments that TRL's scripts pass to every trainer (trl/scripts/sft.py: main), except the data."""
    filled.training.model_init_kwargs = loading_arguments(filled)
    trust = trusts_remote_code(filled)
    return {
        "model": model,
        "args": filled.training,
        "quantization_config": quantization_config(filled.model, model, trust_remote_code=trust),
        "peft_config": peft_config(filled.model, model, own=filled.adapter, trust_remote_code=trust),
        "processing_class": filled.processor if stub is None else stub,
    }


def arguments_of_loaded(filled: Configs, model: str, stub: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns a trainer's arguments without the quantization, and ``from_pretrained`` arguments with it, for a trainer
    that takes a model object."""
    common, loading = trainer_arguments(filled, model, stub), loading_arguments(filled)
    quantization = common.pop("quantization_config")
    return common, loading if quantization is None else {**loading, "quantization_config": quantization}


def loading_arguments(filled: Configs) -> dict[str, Any]:
    """Returns the ``from_pretrained`` arguments that load the model."""
    return {
        "revision": filled.model.model_revision,
        "attn_implementation": filled.model.attn_implementation,
        "dtype": filled.model.dtype,
        "trust_remote_code": trusts_remote_code(filled),
    }


def own_tokenizer(filled: Configs, model: str, **options: Any) -> Any:
    """Loads the model's tokenizer with a padding token, as ``trl/trainer/dpo_trainer.py: __init__`` does."""
    from transformers import AutoTokenizer

    options |= {"trust_remote_code": trusts_remote_code(filled), "revision": filled.model.model_revision}
    return padding(AutoTokenizer.from_pretrained(model, **options))


def padding(tokenizer: Any) -> Any:
    """Makes the end of text the padding token of a tokenizer that has none."""
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def trusts_remote_code(filled: Configs) -> bool:
    """Returns whether a model's own code may run: False for PPO, whose config has no such field."""
    return bool(getattr(filled.training, "trust_remote_code", False))


def quantization_config(asked: Any, model: Any, *, trust_remote_code: bool) -> Any:
    """Returns the quantization config that TRL's arguments describe. A checkpoint in mxfp4 is dequantized.

    transformers cannot train mxfp4 weights (``quantizers/quantizer_mxfp4.py: Mxfp4HfQuantizer.is_trainable``). TRL's
    example also dequantizes them (``examples/scripts/sft_gpt_oss.py``). ``asked``: TRL's ``ModelConfig``. ``model``:
    the model's name, or the model itself."""
    from transformers import Mxfp4Config
    from trl import get_quantization_config

    if (found := get_quantization_config(asked)) is not None or not isinstance(model, str):
        return found
    config = _config_of(asked, model, trust_remote_code=trust_remote_code)
    return Mxfp4Config(dequantize=True) if is_in_mxfp4(config) else None


def is_in_mxfp4(config: Any) -> bool:
    """Returns whether a checkpoint stores its experts in mxfp4, as gpt-oss does."""
    from autotrain_mem.trainers.model_support import checkpoint_quantization, quantization_method  # imports torch

    return quantization_method(checkpoint_quantization(config)) == "mxfp4"


def _config_of(asked: Any, model: Any, *, trust_remote_code: bool) -> Any:
    from transformers import AutoConfig

    options = {"trust_remote_code": trust_remote_code, "revision": asked.model_revision}
    return AutoConfig.from_pretrained(model, **options) if isinstance(model, str) else model.config


def peft_config(asked: Any, model: Any, *, own: str | None = None, trust_remote_code: bool) -> Any:
    """Returns the LoRA config from TRL's arguments, or the given PEFT config; None without an adapter.

    LoRA without targets gets default targets if PEFT does not know the architecture, or if experts are fused: there,
    PEFT 0.21 turns missing targets into an empty list (``peft/utils/transformers_weight_conversion.py:
    _convert_peft_config_moe``).

    Args:
        asked: TRL's ``ModelConfig``.
        model: The model's name, or the model itself.
        own: A PEFT config, as JSON.
    """
    from peft.utils.constants import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as KNOWN
    from trl import get_peft_config

    lora = get_peft_config(asked) if own is None else read_config(own, asked.lora_task_type)
    is_lora = kind_of(own) in ("", LORA)
    if lora is None or not is_lora or lora.target_modules is not None or lora.target_parameters:
        return lora
    config = _config_of(asked, model, trust_remote_code=trust_remote_code)
    if config.model_type not in KNOWN or has_experts(config):
        lora.target_modules = default_targets(config)
    return lora


def with_knobs(keywords: Keywords, method: str, arguments: Mapping[str, Any]) -> Keywords:
    """Adds a plan's LoRA and quantization to a script's keywords, unless the script has its own. ``arguments``: the
    job's arguments, updated with the plan's knobs."""
    from trl import ModelConfig

    changed, model = dict(keywords), keywords["model"]
    asked = _filled(ModelConfig, {**(LORA_TASK if METHODS[method].has_score_head else {}), **arguments})
    trust = bool(arguments.get("trust_remote_code"))
    if keywords.get("peft_config") is None and not is_adapted(model):
        own = arguments.get("peft_config")
        changed["peft_config"] = peft_config(asked, model, own=own, trust_remote_code=trust)
    if isinstance(model, str) and quantization_of(keywords) is None:
        changed["quantization_config"] = quantization_config(asked, model, trust_remote_code=trust)
    return {name: value for name, value in changed.items() if value is not None or name in keywords}


def read_config(text: str, task: str) -> Any:
    """Reads a PEFT config from JSON as ``peft/config.py: PeftConfigMixin.from_pretrained`` does. ``task``: the task
    type for a config that has none."""
    from peft import PeftConfig

    content = {"task_type": task, **json.loads(text)}
    return PeftConfig.from_peft_type(**PeftConfig.check_kwargs(**content))


def default_targets(config: Any) -> str | list[str]:
    """Returns the modules that LoRA adapts if the user names none: PEFT's for this model type, or else ours."""
    from peft.utils.constants import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as KNOWN

    return list(KNOWN[config.model_type]) if config.model_type in KNOWN else planned_targets(config)


def planned_targets(config: Any) -> str:
    """Returns the modules that a plan's LoRA adapts: all linear layers. In a mixture of experts it is only those of
    attention: PEFT 0.21 adapts fused experts only without dropout (``peft/tuners/lora/layer.py: ParamWrapper``)."""
    return ATTENTION if has_experts(config) else "all-linear"


def has_experts(config: Any) -> bool:
    """Returns whether the model is a mixture of experts."""
    return any(getattr(config.get_text_config(), name, None) for name in EXPERTS)


EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""The fields of transformers' configs that hold the number of experts."""
ATTENTION = r".*\.self_attn\.\w*proj\w*"
DIVIDED = (
    *("per_device_train_batch_size", "gradient_accumulation_steps", "per_device_eval_batch_size"),
    *("num_generations", "num_generations_eval", "steps_per_generation", "generation_batch_size"),
)
"""Arguments that a config of GRPO or RLOO checks against each other when it is created, even before a plan exists."""


def undivided(given: Mapping[str, Any]) -> dict[str, Any]:
    """Removes the arguments that TRL's configs may reject before a plan exists."""
    return {name: value for name, value in without_maximized(given).items() if name not in DIVIDED}


OF_WORKERS = ("dataloader_prefetch_factor", "dataloader_persistent_workers", "dataloader_multiprocessing_context")
"""Arguments that need data loader workers (``--dataloader_num_workers``)."""


def on_cpu(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Changes a config's arguments so that a rehearsal trains on CPU tensors. ``rehearsal.cuda.fp16`` imitates fp16."""
    asked = {name: value for name, value in arguments.items() if name not in _NOT_ON_CPU}
    return {**asked, "use_cpu": True, "dataloader_num_workers": 0}


_NOT_ON_CPU = {"ddp_backend", "tf32", "torch_compile", "torch_compile_backend", "torch_compile_mode", *OF_WORKERS}
"""The arguments that a rehearsal removes. ``ddp_backend`` needs a real process group (``accelerate/state.py:
PartialState.__init__``). The others need a card (``transformers/training_args.py: __post_init__``), would compile fake
tensors, or need data loader workers (``torch/utils/data/dataloader.py: __init__``)."""


def on_host(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Changes a config's arguments to train on a real CPU. fp16 becomes bf16, since accelerate silently drops fp16."""
    half = {"fp16": False, "bf16": True} if arguments.get("fp16") else {}
    return {**arguments, **half, "use_cpu": True}
