"""instructor: TOOLS, JSON_SCHEMA, and JSON, in which the server is told of no schema: small models may miss it."""

import json
import sys

import instructor
import openai
from pydantic import BaseModel, Field

client = openai.OpenAI(base_url=f"{sys.argv[1]}/v1", api_key="none", max_retries=0, timeout=120)


class City(BaseModel):
    """A city."""

    name: str = Field(max_length=12)
    million: int = Field(ge=1, le=99)


ASKED = {
    "model": "smollm2",
    "temperature": 0,
    "max_tokens": 200,
    "messages": [{"role": "user", "content": 'A city, such as {"name": "Oslo", "million": 1}.'}],
}
for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
    got = instructor.from_openai(client, mode=mode).create(response_model=City, max_retries=0, **ASKED)
    assert isinstance(got, City), (mode, got)


class Anything(BaseModel):
    """Whatever object it is."""


patched = instructor.from_openai(client, mode=instructor.Mode.JSON)
got, raw = patched.create_with_completion(response_model=Anything, max_retries=0, **ASKED)
assert isinstance(got, Anything) and isinstance(json.loads(raw.choices[0].message.content), dict)
