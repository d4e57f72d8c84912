"""The recipes' models as their sizes alone, so that the suite needs nobody's files; and each of them tiny."""

import json
from pathlib import Path
from typing import Any

FACTS: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("architectures.json").read_text())
"""What memory depends on, of each model's config.json."""

TINY = {"gemma3_text": "gemma3", "llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
"""What ``tiny.tiny_folder`` calls the family."""
