"""Input of the KV cache arithmetic: its record, its JSON form and its checks.

All problems of an input are found at once, each named by the path of its field.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

from ..errors import PlanError
from .groups import DTYPES, KINDS, LayerSpec

_INT64_MAX = 2**63 - 1
# Layers are enumerated one by one; the deepest public models have a few hundred.
_MAX_LAYERS = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class KvPlanInput:
    """What the arithmetic needs to know.

    Fields:
        ranks: per rank (tensor parallel, of one pipeline stage) the layers that it holds; `workers` in the JSON form.
        available_bytes: per rank, memory for the KV cache.
        max_model_len: longest prompt plus output, tokens; with ``auto_fit`` the most that the model allows.
        max_num_batched_tokens: most tokens of one step.
        auto_fit: lower ``max_model_len`` to what fits instead of refusing.
        num_blocks_override: use this many blocks (null block included) instead of the measured memory.
        batches_in_flight: steps submitted before the first has finished (2 with asynchronous scheduling).
        name: free text, for messages.
    """

    ranks: tuple[tuple[LayerSpec, ...], ...]
    available_bytes: tuple[int, ...]
    max_model_len: int
    max_num_batched_tokens: int
    auto_fit: bool = False
    num_blocks_override: int | None = None
    batches_in_flight: int = 1
    name: str = ""


_NUMBERS = {"max_model_len": 1, "max_num_batched_tokens": 1, "num_blocks_override": 1, "batches_in_flight": 1}
_OTHER_FIELDS = tuple(field.name for field in fields(KvPlanInput) if field.name != "ranks")
_INPUT_FIELDS = ("workers", *_OTHER_FIELDS)
_INPUT_REQUIRED = ("workers", "available_bytes", "max_model_len", "max_num_batched_tokens")


def parse_input(obj: object, path: str = "") -> KvPlanInput:
    """``KvPlanInput`` from its JSON form.

    Raises:
        PlanError: code ``invalid_input``; ``problems`` names every wrong field by its path.
    """
    problems = input_problems(obj, path)
    if problems:
        raise PlanError("invalid_input", problems)
    assert isinstance(obj, dict)
    return KvPlanInput(
        **{
            **{name: value for name, value in obj.items() if name != "workers"},
            "ranks": tuple(tuple(LayerSpec(**spec) for spec in rank) for rank in obj["workers"]),
            "available_bytes": tuple(obj["available_bytes"]),
        }
    )


def as_json(inp: KvPlanInput) -> dict[str, object]:
    """The JSON form of an input, absent fields left out."""

    def present(record: object, names: Sequence[str]) -> dict[str, object]:
        return {name: value for name in names if (value := getattr(record, name)) is not None}

    spec_fields = [field.name for field in fields(LayerSpec)]
    ranks = [[present(spec, spec_fields) for spec in rank] for rank in inp.ranks]
    return {**present(inp, _OTHER_FIELDS), "workers": ranks, "available_bytes": list(inp.available_bytes)}


def input_problems(obj: object, path: str = "") -> list[str]:
    """Every problem of one JSON input, each as ``path.to.field: what is wrong``."""
    prefix = f"{path}." if path else ""
    if not isinstance(obj, dict):
        return [f"{path or 'input'}: must be an object with {', '.join(_INPUT_REQUIRED)}, got {_show(obj)}"]
    problems = _field_problems(obj, _INPUT_REQUIRED, _INPUT_FIELDS, prefix)
    for name, least in _NUMBERS.items():
        if name in obj and not (name == "num_blocks_override" and obj[name] is None):
            problems.extend(_number_problems(obj[name], least, _INT64_MAX, prefix + name))
    if not isinstance(obj.get("auto_fit", False), bool):
        problems.append(f"{prefix}auto_fit: must be true or false, got {_show(obj['auto_fit'])}")
    if not isinstance(obj.get("name", ""), str):
        problems.append(f"{prefix}name: must be a string, got {_show(obj['name'])}")

    ranks, available = obj.get("workers"), obj.get("available_bytes")
    if "workers" in obj:
        problems.extend(_rank_problems(ranks, f"{prefix}workers"))
    if "available_bytes" in obj:
        if isinstance(available, list):
            for number, value in enumerate(available):
                problems.extend(_number_problems(value, 0, _INT64_MAX, f"{prefix}available_bytes[{number}]"))
        else:
            problems.append(f"{prefix}available_bytes: must be a list with one number a rank, got {_show(available)}")
    if isinstance(ranks, list) and isinstance(available, list) and len(ranks) != len(available):
        problems.append(f"{prefix}available_bytes: must have one number a rank ({len(ranks)}), got {len(available)}")
    return problems


def _rank_problems(ranks: object, path: str) -> list[str]:
    if not isinstance(ranks, list) or not ranks:
        return [f"{path}: must be a non-empty list with one list of layer specs a rank, got {_show(ranks)}"]
    problems: list[str] = []
    for number, rank in enumerate(ranks):
        where = f"{path}[{number}]"
        if not isinstance(rank, list) or not rank:
            problems.append(f"{where}: must be a non-empty list of layer specs, got {_show(rank)}")
            continue
        for index, spec in enumerate(rank):
            problems.extend(_spec_problems(spec, f"{where}[{index}]"))
    return problems


def _spec_problems(spec: object, path: str) -> list[str]:
    if not isinstance(spec, dict):
        return [f"{path}: must be an object with kind, layers, block_size and dtype, got {_show(spec)}"]
    kind = spec.get("kind")
    rule = KINDS.get(kind) if isinstance(kind, str) else None
    if rule is None:
        got = _show(kind) if "kind" in spec else "nothing"
        return [f"{path}.kind: must be one of {', '.join(KINDS)}, got {got}"]
    required = ("kind", *rule.required)
    problems = _field_problems(spec, required, (*required, *rule.optional), f"{path}.")
    for name in (*rule.required, *rule.optional):
        if name == "dtype":
            if name in spec and (not isinstance(spec[name], str) or spec[name] not in DTYPES):
                problems.append(f"{path}.dtype: must be one of {', '.join(DTYPES)}, got {_show(spec[name])}")
        elif name in spec:
            limit = _MAX_LAYERS if name == "layers" else _INT64_MAX
            problems.extend(_number_problems(spec[name], 1, limit, f"{path}.{name}"))
    return problems


def _field_problems(obj: Mapping[str, object], required: Sequence[str], known: Sequence[str], prefix: str) -> list[str]:
    missing = [f"{prefix}{name}: missing" for name in required if name not in obj]
    unknown = [f"{prefix}{name}: unknown field; known are {', '.join(known)}" for name in obj if name not in known]
    return missing + unknown


def _number_problems(value: object, least: int, most: int, path: str) -> list[str]:
    # bool is an int in Python, and JSON's NaN arrives as a float: neither is a count.
    if isinstance(value, bool) or not isinstance(value, int):
        return [f"{path}: must be an integer, got {_show(value)}"]
    if not least <= value <= most:
        return [f"{path}: must be from {least} to {most}, got {_show(value)}"]
    return []


def _show(value: object) -> str:
    try:
        text = repr(value)
    except ValueError:
        return "a number with too many digits"
    return text if len(text) <= 60 else f"{text[:57]}..."
