"""The official client: chat, streams, responses, parsed answers, tools, completions with scores, refusals by name."""

import json
import sys

import openai
from pydantic import BaseModel, Field

MODEL = "smollm2"
client = openai.OpenAI(base_url=f"{sys.argv[1]}/v1", api_key="none", max_retries=0, timeout=120)
HELLO = [{"role": "user", "content": "Say hello."}]


class City(BaseModel):
    name: str = Field(max_length=12)
    million: int = Field(ge=1, le=99)


TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 12}},
            "required": ["city"],
        },
    },
}

chat = client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=16, temperature=0, n=2)
assert len(chat.choices) == 2 and chat.choices[0].message.content and chat.usage.completion_tokens > 0

stream = client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=16, temperature=0, stream=True)
text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
assert text == chat.choices[0].message.content

with client.chat.completions.stream(model=MODEL, messages=HELLO, max_tokens=16, temperature=0) as events:
    contents = [event.content for event in events if event.type == "content.done"]
    assert contents == [text]

parsed = client.chat.completions.parse(
    model=MODEL, messages=[{"role": "user", "content": "A city?"}], response_format=City, temperature=0, max_tokens=200
)
assert isinstance(parsed.choices[0].message.parsed, City)

called = client.chat.completions.create(
    model=MODEL,
    messages=[{"role": "user", "content": "Weather in Oslo?"}],
    tools=[TOOL],
    tool_choice="required",
    temperature=0,
    max_tokens=200,
)
assert called.choices[0].finish_reason == "tool_calls"
call = called.choices[0].message.tool_calls[0]
assert call.function.name == "weather" and "city" in json.loads(call.function.arguments)
answered = client.chat.completions.create(
    model=MODEL,
    messages=[
        {"role": "user", "content": "Weather in Oslo?"},
        called.choices[0].message,
        {"role": "tool", "tool_call_id": call.id, "content": "Sunny, 20 degrees."},
    ],
    tools=[TOOL],
    max_tokens=16,
)
assert answered.choices[0].finish_reason in {"stop", "length", "tool_calls"}

response = client.responses.create(model=MODEL, input="Say hello.", max_output_tokens=16, temperature=0, store=False)
assert response.output_text == text
with client.responses.stream(
    model=MODEL, input="Say hello.", max_output_tokens=16, temperature=0, store=False
) as events:
    kinds = [event.type for event in events]
    assert kinds[0] == "response.created" and kinds[-1] in {"response.completed", "response.incomplete"}
structured = client.responses.parse(
    model=MODEL, input="A city?", text_format=City, temperature=0, max_output_tokens=200, store=False
)
assert isinstance(structured.output_parsed, City)

scored = client.completions.create(
    model=MODEL, prompt=["An isthmus is", "The sea is"], echo=True, logprobs=1, max_tokens=0
)
assert [choice.text for choice in scored.choices] == ["An isthmus is", "The sea is"]
assert scored.choices[0].logprobs.token_logprobs[0] is None
assert all(value < 0 for value in scored.choices[0].logprobs.token_logprobs[1:])

for what in ({"modalities": ["text", "audio"]}, {"audio": {"voice": "alloy", "format": "wav"}}):
    try:
        client.chat.completions.create(model=MODEL, messages=HELLO, **what)
    except openai.BadRequestError as error:
        assert error.param == next(iter(what)), error
    else:
        raise AssertionError(f"{what} was taken")
