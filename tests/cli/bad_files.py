"""Everything that can be wrong with a model folder, a dataset, a config or a plan, as files."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

from autotrain_mem.cli import word_problems

DATASETS = {
    "empty.jsonl": b"",
    "not_json.jsonl": b'{"text": "a"}\n\n{"text": b}\n',
    "other_columns.jsonl": b'{"question": "a", "answer": "b"}\n',
    "text_is_empty.jsonl": b'{"text": ""}\n{"text": ""}\n',
    "messages_empty.jsonl": b'{"messages": [{"role": "user", "content": "a"}]}\n{"messages": []}\n{"messages": []}\n',
    "open_quote.csv": b'text,b\n1,2,3\n"x\n',
}

CONFIGS = {
    "not_yaml.yaml": b"a: [1\nb: }\n",
    "not_utf8.yaml": b"\xff\xfe\x00a: 1",
    "list_for_a_number.yaml": b"model_name_or_path: tiny\ngpu: 300MiB\nweight_decay: [2e-4]\n",
    "axolotls_words.yaml": b"base_model: tiny\ngpu: 300MiB\nsequence_len: 64.0\nmicro_batch_size: two\n",
    "axolotls_length.yaml": b"base_model: tiny\nsequence_len: 2k\n",
    "axolotls_dpo.yaml": b"base_model: tiny\nrl: dpo\n",
    "factorys_galore.yaml": b"model_name_or_path: tiny\nstage: sft\nfinetuning_type: full\nuse_galore: true\n",
    "recipes_template.yaml": b"model_name_or_path: tiny\nchat_template: '{{ messages }}'\ndataset_mixer: {rows: 1.0}\n",
    "a_list.yaml": b"- a\n- b\n",
    "unknown_keys.yaml": b"model_name_or_path: tiny\nlearning_ratt: 1e-4\ngpuu: 300MiB\n",
    "mistyped_blocks.yaml": b"model: tiny\nauto-fit:\n  gpu: 300MiB\nenvs:\n  SOME: 1\n",
    "fixed_segments.yaml": b"model: tiny\nenv:\n  PYTORCH_ALLOC_CONF: expandable_segments:False\n",
    "env_allocator.yaml": b"model: tiny\nenv:\n  PYTORCH_ALLOC_CONF: backend:cudaMallocAsync\n",
    "deepspeed.yaml": b"distributed_type: DEEPSPEED\nnum_processes: 8\n",
    "autofit_number.yaml": b"model: tiny\nautofit: 7\n",
    "autofit_unknown.yaml": b"model: tiny\nautofit:\n  gppu: true\n  forbidd: lora\n",
    "laughs.yaml": b"a: &a [1]\n" + b"".join(b"%c: &%c [%s1]\n" % (c, c, 9 * (b"*%c," % (c - 1))) for c in b"bcdefgh"),
    "itself.yaml": b"a: &a [*a]\n",
    "wide.jinja": b"{{ 'x' * 70_000_000 }}",
    "too_deep.yaml": b"a: " + b"{a: " * 2_000,
    "too_large.yaml": b"# " + b"x" * 300_000,
    "month_13.yaml": b"a: 2020-13-01\n",
    "wrong_type.yaml": b"model: tiny\ngpu: 300MiB\nper_device_train_batch_size: abc\n",
}

PLANS = {
    "empty_plan.json": b"\n",
    "cut_short_plan.json": b'{\n  "schema": "autofit.plan/6",\n  "method": "sft",\n  "model": "Qwen/Qw',
    "old_plan.json": b'{"schema": "autofit.plan/2", "method": "sft", "model": "Qwen/Qwen2.5-0.5B", "seconds": 9}',
    "old_fit.json": b'{"schema": "autofit.fit/1", "plan": {"schema": "autofit.plan/1", "method": "dpo"}, "run": {}}',
    "an_estimate.json": b'{"schema": "autofit.estimate/1", "fits": true}',
}

REWARDS = """
def short(completions, **kwargs):
    return [-len(str(completion)) for completion in completions]

def raises(completions, **kwargs):
    return [completion["answer"] for completion in completions]

THRESHOLD = 0.5
"""

_SMALL = {"vocab_size": 512, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
MODELS = {
    "cut_short": '{"model_type": ',
    "no_type": '{"hidden_size": 4}',
    "made_up_type": json.dumps({"model_type": "gronkulator", "architectures": ["GronkForCausalLM"]}),
    "made_up_class": json.dumps({"model_type": "qwen2", "architectures": ["GronkForCausalLM"], **_SMALL}),
    "no_class": json.dumps({"model_type": "qwen2", **_SMALL}),
    "wrong_size": json.dumps({"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "hidden_size": "x"}),
    "bert": json.dumps({"model_type": "bert", "architectures": ["BertForMaskedLM"], **_SMALL}),
    "mamba": json.dumps({"model_type": "mamba", "architectures": ["MambaForCausalLM"], "vocab_size": 512}),
}


def write(folder: Path, rows: list[dict[str, Any]]) -> None:
    """Write them all beside ``tiny`` and the good rows of ``data.jsonl``, and good data of the other kinds too."""
    # the tiny model without its template or its tokenizer, as a judge, quantized, as an adapter, badly padded
    for name in ("no_template", "same_pad", "judge", "small_vocabulary"):
        shutil.copytree(folder / "tiny", folder / name)
    (folder / "no_template" / "chat_template.jinja").unlink()
    shutil.copytree(folder / "tiny", folder / "weights_alone", ignore=shutil.ignore_patterns("tokenizer*"))
    for name in ("no_config", "no_files", "splits"):
        (folder / name).mkdir()
    config, padded = (json.loads((folder / "tiny" / f"{name}config.json").read_text()) for name in ("", "tokenizer_"))
    four_bits = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    changes = {
        "no_tokenizer": {},
        "judge": {"architectures": ["Qwen2ForSequenceClassification"]},
        "quantized": {"quantization_config": four_bits},
        "small_vocabulary": {"vocab_size": 300},
    }
    models = MODELS | {name: json.dumps(config | changed) for name, changed in changes.items()}
    texts = {
        **{f"{name}/config.json": content for name, content in models.items()},
        "adapter/adapter_config.json": "{}",
        "same_pad/tokenizer_config.json": json.dumps(padded | {"pad_token": "<|im_end|>"}),
        "broken/rows.jsonl": "text: a\n",
        "questions/rows.jsonl": '{"question": "a", "answer": "b"}\n',
        "mixed/chats.jsonl": '{"text": "a"}\n',
        "mixed/pairs.jsonl": '{"prompt": "a", "chosen": "b", "rejected": "c"}\n',
        "my_rewards.py": REWARDS,
        "broken_rewards.py": "from a_package_that_nobody_has import a\n",
    }
    for name, content in {**DATASETS, **CONFIGS, **PLANS, **texts}.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)
    os.mkfifo(folder / "pipe.yaml")
    # good data of other kinds
    spoken = [{"text": " ".join(message["content"] for message in row["messages"])} for row in rows]
    written = {"splits/train": rows, "splits/test": rows[:8], "text": spoken}
    written["long_prompt"] = [{"prompt": "How many? " * 800}]
    for name, some in written.items():
        word_problems.write_rows(folder / f"{name}.jsonl", some)
