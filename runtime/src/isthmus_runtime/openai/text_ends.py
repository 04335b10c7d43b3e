"""Special tokens before and after each text, as transformers has them (its classes as of 4.57).

What tokenizer.json says in its post-processor counts, but for some classes, which make another one of `add_bos_token`
and `add_eos_token`. The others do not look at these: Qwen's embedding models say `add_bos_token: false`, and have a
post-processor that ends each text with the token that is pooled.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from ..errors import ConfigError

_BEGINS = {
    "LlamaTokenizer": True,
    "CodeLlamaTokenizer": True,
    "GemmaTokenizer": True,
    "CohereTokenizer": True,
    "GPTNeoXTokenizer": False,
}
"""Classes that make their own post-processor -> what `add_bos_token` is where it is not given."""
_CLASSES = {
    "llama": "LlamaTokenizer",
    "mistral": "LlamaTokenizer",
    "mixtral": "LlamaTokenizer",
    "deepseek": "LlamaTokenizer",
    "phi3": "LlamaTokenizer",
    "gemma": "GemmaTokenizer",
    "cohere": "CohereTokenizer",
    "gpt_neox": "GPTNeoXTokenizer",
    "olmo": "GPTNeoXTokenizer",
    "stablelm": "GPTNeoXTokenizer",
}
"""Beginning of a `model_type` -> its class where tokenizer_config.json names none."""


def set_ends(tokenizer: Tokenizer, config: Mapping[str, Any], names: Mapping[str, str], model_type: str) -> None:
    """Have `tokenizer` add what the model's class would. `config` is tokenizer_config.json, `names` the texts of its
    special tokens. ConfigError where one is asked for that is no token."""
    given = {name: config.get(f"add_{name}") for name in ("bos_token", "eos_token")}
    kind = str(config.get("tokenizer_class") or "").removesuffix("Fast")
    if not kind:
        kind = next((name for begin, name in _CLASSES.items() if model_type.startswith(begin)), "")
    # Of a model that nobody knows, what is written down holds.
    if kind not in _BEGINS and (kind or model_type or given["bos_token"] is None):
        return
    usual = {"bos_token": _BEGINS.get(kind, False), "eos_token": False}
    ids: dict[str, tuple[str, int]] = {}
    for name, wanted in given.items():
        text = names.get(name)
        number = tokenizer.token_to_id(text) if text is not None else None
        if wanted and number is None:
            raise ConfigError(
                f"tokenizer_config.json: add_{name} is true, but {name} {text!r} is not a token of tokenizer.json"
            )
        if text is not None and number is not None and (usual[name] if wanted is None else wanted):
            ids[name] = text, number
    before = [f"{ids['bos_token'][0]}:0"] if "bos_token" in ids else []
    after = [f"{ids['eos_token'][0]}:0"] if "eos_token" in ids else []
    tokenizer.post_processor = TemplateProcessing(
        single=[*before, "$A:0", *after], pair=None, special_tokens=list(dict.fromkeys(ids.values()))
    )
