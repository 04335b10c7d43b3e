"""`response_format` and `structured_outputs`: what the text of an answer must be."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from ..errors import InvalidRequest
from ..request import Structure
from ..structured.compiled import MAX_TEXT
from ..structured.sources import MAX_CHOICES
from .bodies import least_written


def check_length(value: Any, param: str, most: int = MAX_TEXT) -> None:
    """Raise InvalidRequest, naming `param`, where `value` is longer as JSON than `most`: than any structure may be."""
    found = len(value) if isinstance(value, str) else least_written(value, most)
    if found > most:
        raise InvalidRequest(f"{param}: {found} characters or more, at most {most} are allowed", param=param)


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class TextFormat(_Strict):
    """Any text."""

    type: Literal["text"]


class JsonObjectFormat(_Strict):
    """A JSON object."""

    type: Literal["json_object"]


class JsonSchema(_Strict):
    """A JSON schema, with a name for it."""

    name: str = Field(max_length=256)
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None
    """The schema is kept to, whatever this says."""


class JsonSchemaFormat(_Strict):
    """JSON that a schema describes."""

    type: Literal["json_schema"]
    json_schema: JsonSchema

    @model_validator(mode="after")
    def _check(self) -> JsonSchemaFormat:
        check_length(self.json_schema.schema_, "response_format")
        return self


ResponseFormat = Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")]


class StructuredOutputs(_Strict):
    """An extension with the names that vLLM uses: exactly one of its fields."""

    json_: dict[str, Any] | str | None = Field(default=None, alias="json")
    """A JSON schema, or its text."""
    json_object: Literal[True] | None = None
    regex: str | None = Field(default=None, min_length=1)
    choice: list[str] | None = Field(default=None, min_length=1, max_length=MAX_CHOICES)
    grammar: str | None = Field(default=None, min_length=1)
    """In Lark's syntax; the start rule is `start`."""

    @model_validator(mode="after")
    def _check(self) -> StructuredOutputs:
        given = [name for name, value in self if value is not None]
        if len(given) != 1:
            raise ValueError(
                "structured_outputs: give exactly one of json, json_object, regex, choice and grammar; "
                f"{len(given)} are given"
            )
        check_length(getattr(self, given[0]), "structured_outputs")
        return self

    def structure(self) -> Structure:
        """The structure as the engine knows it."""
        if self.json_ is not None:
            return Structure("json_schema", self.json_ if isinstance(self.json_, str) else json.dumps(self.json_))
        if self.regex is not None:
            return Structure("regex", self.regex)
        if self.choice is not None:
            return Structure("choice", json.dumps(self.choice))
        if self.grammar is not None:
            return Structure("grammar", self.grammar)
        return Structure("json_object")


def structure_of(form: TextFormat | JsonObjectFormat | JsonSchemaFormat) -> Structure | None:
    """What a `response_format` asks for; None: nothing."""
    match form:
        case JsonSchemaFormat():
            return Structure("json_schema", json.dumps(form.json_schema.schema_))
        case JsonObjectFormat():
            return Structure("json_object")
        case TextFormat():
            return None
