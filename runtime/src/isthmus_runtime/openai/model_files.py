"""What the API reads of a model directory: the tokenizer, its chat template, and how generations begin and end."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError
from tokenizers import Tokenizer as HfTokenizer

from ..errors import ConfigError
from ..request import SamplingOptions

_OPTIONS = TypeAdapter(SamplingOptions)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFiles:
    """What the API reads of one model directory."""

    tokenizer: HfTokenizer
    """Cuts and pads nothing."""
    config: Mapping[str, Any]
    """tokenizer_config.json over special_tokens_map.json."""
    eos_token_ids: tuple[int, ...]
    vocab_size: int
    chat_template: str | None
    defaults: SamplingOptions
    """Of generation_config.json."""
    model_limit: int
    """Tokens that the model is made for; 0: config.json does not say."""
    model_type: str


def read_model_files(path: str | Path) -> ModelFiles:
    """Read a Hugging Face model directory. ConfigError names the file and what is wrong with it."""
    root = Path(path)
    file = root / "tokenizer.json"
    if not file.is_file():
        raise ConfigError(f"--model {path}: there is no tokenizer.json; give a Hugging Face model directory")
    try:
        tokenizer = HfTokenizer.from_file(str(file))
    except Exception as e:  # the library raises plain Exception
        raise ConfigError(f"{file}: {e}") from e
    tokenizer.no_truncation()
    tokenizer.no_padding()
    config = {**_read_json(root / "special_tokens_map.json"), **_read_json(root / "tokenizer_config.json")}
    model = _read_json(root / "config.json")
    generation = _read_json(root / "generation_config.json")
    text_model = model.get("text_config") or model
    if not isinstance(text_model, dict):
        raise ConfigError(f"{root / 'config.json'}: text_config is {text_model!r}, expected an object")
    size = _vocab_size(root, text_model, tokenizer)
    ends = _eos_ids(tokenizer, generation, model, text_model, config)
    return ModelFiles(
        tokenizer=tokenizer,
        config=config,
        eos_token_ids=tuple(i for i in ends if 0 <= i < size),  # -1 where a model has none
        vocab_size=size,
        chat_template=_template_source(root, config),
        defaults=_defaults(root, generation),
        model_limit=limit if type(limit := text_model.get("max_position_embeddings")) is int else 0,
        model_type=str(model.get("model_type") or ""),
    )


def token_text(value: object) -> str | None:
    """A special token as tokenizer_config.json writes it: text, or an object with `content`."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as e:
        raise ConfigError(f"{path}: {e}") from e
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: holds a JSON {type(value).__name__}, expected an object")
    return value


def _vocab_size(root: Path, text_model: Mapping[str, Any], tokenizer: HfTokenizer) -> int:
    value = text_model.get("vocab_size")
    if value is None:
        return int(tokenizer.get_vocab_size())
    if type(value) is not int or value < 1:
        raise ConfigError(f"{root / 'config.json'}: vocab_size is {value!r}, expected a whole number of at least 1")
    return value


def _eos_ids(
    tokenizer: HfTokenizer,
    generation: Mapping[str, Any],
    model: Mapping[str, Any],
    text_model: Mapping[str, Any],
    config: Mapping[str, Any],
) -> tuple[int, ...]:
    ids: list[int] = []
    for source in (generation, model, text_model):
        value = source.get("eos_token_id")
        ids += [value] if isinstance(value, int) else value if isinstance(value, list) else []
    text = token_text(config.get("eos_token"))
    if text is not None and (found := tokenizer.token_to_id(text)) is not None:
        ids.append(found)
    return tuple(dict.fromkeys(ids))


def _template_source(root: Path, config: Mapping[str, Any]) -> str | None:
    file = root / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    value = config.get("chat_template")
    if isinstance(value, list):
        named = {entry.get("name"): entry.get("template") for entry in value if isinstance(entry, dict)}
        value = named.get("default")
    if value is not None and not isinstance(value, str):
        raise ConfigError(f"{root / 'tokenizer_config.json'}: chat_template is {type(value).__name__}, expected text")
    return value


def _defaults(root: Path, generation: Mapping[str, Any]) -> SamplingOptions:
    """Sampling options that generation_config.json names. ConfigError lists those that are out of range."""
    named = {f.name: value for f in fields(SamplingOptions) if (value := generation.get(f.name)) is not None}
    try:
        # As JSON, which pydantic in its strict form makes a record of.
        return _OPTIONS.validate_json(json.dumps(named), strict=True)
    except ValidationError as e:
        file = root / "generation_config.json"
        raise ConfigError(
            [f"{file}: {error['loc'][0]} {error['input']!r}: {error['msg']}" for error in e.errors(include_url=False)]
        ) from e
