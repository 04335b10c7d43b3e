"""Field types shared by spec and status: Kubernetes quantities, durations and counts, and the base of all blocks.

Texts stay as the user wrote them (they are printed back in errors and manifests); `canonical` is what the revision
hash sees, so that `1Gi` and `1024Mi` are the same revision.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from decimal import Decimal
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler, GetJsonSchemaHandler, StringConstraints
from pydantic.alias_generators import to_camel
from pydantic_core import CoreSchema, core_schema

QUANTITY_PATTERN = r"^[0-9]+([.][0-9]+)?([eE][0-9]{1,2}|[numkMGTP]|[KMGTP]i)?$"
DURATION_PATTERN = r"^([0-9]+([.][0-9]+)?(ms|s|m|h))+$"
PERCENT_PATTERN = r"^(100|[1-9]?[0-9])%$"
_QUANTITY = re.compile(r"^([0-9]+(?:[.][0-9]+)?)(?:([eE][0-9]{1,2})|([numkMGTP]|[KMGTP]i))?$")
_MOST_CHARACTERS = 32
MOST_QUANTITY = 2**63 - 1
"""As Kubernetes has it."""
MOST_DURATION_S = 366 * 24 * 3600
"""A year, the most that engines and routers take."""
MOST_COUNT = 10_000
_UNITS: dict[str, Decimal] = {
    **{unit: Decimal(f"1e{power}") for unit, power in zip("numkMGTP", (-9, -6, -3, 3, 6, 9, 12, 15), strict=True)},
    **{f"{unit}i": Decimal(2) ** (10 * n) for n, unit in enumerate("KMGTP", start=1)},
}
_DURATION_PART = re.compile(r"([0-9]+(?:[.][0-9]+)?)(ms|s|m|h)")
_SECONDS = {"ms": Decimal("0.001"), "s": Decimal(1), "m": Decimal(60), "h": Decimal(3600)}


def _checked_text(parse: Callable[[object], str]) -> CoreSchema:
    return core_schema.no_info_plain_validator_function(
        parse, serialization=core_schema.plain_serializer_function_ser_schema(str)
    )


class Quantity(str):
    """A Kubernetes quantity: `512Mi`, `1G`, `500m`, or a whole number."""

    __slots__ = ()

    @property
    def value(self) -> Decimal:
        """The number meant, in base units (bytes, cores, devices)."""
        match = _QUANTITY.match(self)
        assert match is not None
        return Decimal(match[1] + (match[2] or "")) * _UNITS.get(match[3] or "", Decimal(1))

    @property
    def canonical(self) -> str:
        return format(self.value.normalize(), "f")

    @classmethod
    def parse(cls, value: object) -> Quantity:
        if isinstance(value, float):
            raise ValueError(
                'a quantity with a fraction in quotes, for example "0.25", or in thousandths, for example 250m'
            )
        most = f"a quantity of at most {MOST_QUANTITY}, in {_MOST_CHARACTERS} characters or fewer"
        text = str(value) if isinstance(value, int) and not isinstance(value, bool) else value
        if isinstance(text, str) and len(text) > _MOST_CHARACTERS:
            raise ValueError(most)
        if not isinstance(text, str) or not _QUANTITY.fullmatch(text):
            raise ValueError("a quantity: a number with one of m k M G T P Ki Mi Gi Ti Pi, for example 512Mi")
        if cls(text).value > MOST_QUANTITY:
            raise ValueError(most)
        return cls(text)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        return _checked_text(cls.parse)

    @classmethod
    def __get_pydantic_json_schema__(cls, core: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {
            "anyOf": [{"type": "integer"}, {"type": "string"}],
            "x-kubernetes-int-or-string": True,
            "pattern": QUANTITY_PATTERN,
            "maxLength": 32,
        }


class Duration(str):
    """A duration above zero as Kubernetes writes it: `30s`, `5m`, `1h30m`, `250ms`."""

    __slots__ = ()

    @property
    def seconds(self) -> float:
        return float(self._exact)

    @property
    def canonical(self) -> str:
        return f"{format(self._exact.normalize(), 'f')}s"

    @property
    def _exact(self) -> Decimal:
        return sum((Decimal(n) * _SECONDS[unit] for n, unit in _DURATION_PART.findall(self)), Decimal(0))

    @classmethod
    def parse(cls, value: object) -> Duration:
        most = f"a duration of at most {MOST_DURATION_S // 3600}h, in {_MOST_CHARACTERS} characters or fewer"
        if isinstance(value, str) and len(value) > _MOST_CHARACTERS:
            raise ValueError(most)
        if not isinstance(value, str) or not re.fullmatch(DURATION_PATTERN, value) or cls(value).seconds <= 0:
            raise ValueError("a duration above zero: numbers with ms, s, m or h, for example 90s or 1h30m")
        if cls(value).seconds > MOST_DURATION_S:
            raise ValueError(most)
        return cls(value)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        return _checked_text(cls.parse)

    @classmethod
    def __get_pydantic_json_schema__(cls, core: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {"type": "string", "pattern": DURATION_PATTERN, "maxLength": 32}


class CountOrPercent(str):
    """A number of pods, or a share of the desired pods such as `25%`."""

    __slots__ = ()

    def of(self, total: int, *, round_up: bool) -> int:
        """How many of `total` pods this is."""
        if not self.endswith("%"):
            return int(self)
        scaled = total * int(self[:-1])
        return -(-scaled // 100) if round_up else scaled // 100

    @property
    def is_zero(self) -> bool:
        return int(self.rstrip("%")) == 0

    @property
    def canonical(self) -> str:
        return str(self)

    @classmethod
    def parse(cls, value: object) -> CountOrPercent:
        if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MOST_COUNT:
            return cls(value)
        if isinstance(value, str) and re.fullmatch(PERCENT_PATTERN, value):
            return cls(value)
        raise ValueError(f"a whole number from 0 to {MOST_COUNT}, or a percentage from 0% to 100%")

    @classmethod
    def __get_pydantic_core_schema__(cls, source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        return _checked_text(cls.parse)

    @classmethod
    def __get_pydantic_json_schema__(cls, core: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {
            "anyOf": [{"type": "integer"}, {"type": "string"}],
            "x-kubernetes-int-or-string": True,
            "minimum": 0,
            "maximum": MOST_COUNT,
            "pattern": PERCENT_PATTERN,
            "maxLength": 4,
        }


Name = Annotated[str, StringConstraints(min_length=1, max_length=63, pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$")]
"""Name of another Kubernetes object."""
Text = Annotated[str, StringConstraints(min_length=1, max_length=256)]
AbsolutePath = Annotated[str, StringConstraints(min_length=2, max_length=512, pattern=r"^/[^\s]*[^/\s]$")]
Label = Annotated[str, StringConstraints(max_length=316, pattern=r"^[A-Za-z0-9]([-A-Za-z0-9_./]*[A-Za-z0-9])?$")]


class Block(BaseModel):
    """Base of every block of the resource: camelCase in manifests, immutable, unknown fields refused."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, alias_generator=to_camel, use_attribute_docstrings=True
    )


def canonical(value: object) -> object:
    """A block as plain data that two equal meanings share: units resolved, everything equal to its default left out.

    Leaving defaults out is what lets a later version add fields without changing any existing revision.
    """
    if isinstance(value, Block):
        out: dict[str, object] = {}
        for name, alias, default in _canonical_defaults(type(value)):
            item = canonical(getattr(value, name))
            if item != default:
                out[alias] = item
        return out
    if isinstance(value, Quantity | Duration | CountOrPercent):
        return value.canonical
    if isinstance(value, dict):
        return {str(key): canonical(item) for key, item in sorted(value.items())}
    if isinstance(value, tuple | list):
        return [canonical(item) for item in value]
    return value


@functools.cache
def _canonical_defaults(block: type[Block]) -> tuple[tuple[str, str, object], ...]:
    """(attribute, field name, canonical default) of every field."""
    return tuple(
        (name, info.alias or name, canonical(info.get_default(call_default_factory=True)))
        for name, info in block.model_fields.items()
    )
