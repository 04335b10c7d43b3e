"""Anthropic's client: messages, streams, tools and their results, its tool runner, parsed answers, counts."""

import sys
from typing import Literal

import anthropic
from pydantic import BaseModel

MODEL = "smollm2"
client = anthropic.Anthropic(base_url=sys.argv[1], api_key="none", max_retries=0, timeout=120)
HELLO = [{"role": "user", "content": "Say hello."}]
GREEDY = {"temperature": 0}


class City(BaseModel):
    """The client sends no lengths and ranges of a schema, so that these are the bounded kinds."""

    size: Literal["small", "large"]
    coastal: bool


TOOL = {
    "name": "weather",
    "description": "The weather of a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 12}},
        "required": ["city"],
    },
}

ask = {"model": MODEL, "max_tokens": 16, "messages": HELLO, "extra_body": GREEDY}
whole = client.messages.create(**ask, system="Be brief.", cache_control={"type": "ephemeral"})
assert whole.content[0].text and whole.usage.output_tokens > 0
with client.messages.stream(**ask, system="Be brief.") as stream:
    assert "".join(stream.text_stream) == whole.content[0].text

ask["max_tokens"] = 200
parsed = client.messages.parse(**ask, output_format=City)
assert isinstance(parsed.parsed_output, City)
with client.messages.stream(**ask, output_format=City) as stream:
    assert stream.get_final_message().parsed_output == parsed.parsed_output

called = client.messages.create(**ask, tools=[TOOL], tool_choice={"type": "any"})
assert called.stop_reason == "tool_use"
call = called.content[-1]
assert call.name == "weather" and "city" in call.input
with client.messages.stream(**ask, tools=[TOOL], tool_choice={"type": "any"}) as stream:
    assert stream.get_final_message().content[-1].input == call.input
result = {"type": "tool_result", "tool_use_id": call.id, "content": "3 degrees"}
turns = [*HELLO, {"role": "assistant", "content": called.content}, {"role": "user", "content": [result]}]
assert client.messages.create(**{**ask, "messages": turns}, tools=[TOOL]).content


@anthropic.beta_tool
def weather(city: str) -> str:
    """The weather of a city."""
    return f"3 degrees in {city}"


runner = client.beta.messages.tool_runner(**ask, tools=[weather], max_iterations=2)
assert all(message.content for message in runner)

assert client.messages.count_tokens(model=MODEL, messages=HELLO).input_tokens > 0
assert [model.id for model in client.models.list()] == [MODEL]
try:
    client.messages.create(model=MODEL, max_tokens=5, messages=[{"role": "user", "content": "a " * 5000}])
except anthropic.BadRequestError as e:
    assert "prompt is too long" in str(e)
else:
    raise AssertionError("a prompt beyond the model's context was taken")
