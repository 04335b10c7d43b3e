"""LiteLLM: completion, stream, structured output, tools, text completion."""

import json
import sys

import litellm
from pydantic import BaseModel, Field

litellm.telemetry = False
ARGS = {"model": "openai/smollm2", "api_base": f"{sys.argv[1]}/v1", "api_key": "none", "temperature": 0}
HELLO = [{"role": "user", "content": "Say hello."}]


class City(BaseModel):
    name: str = Field(max_length=12)
    million: int = Field(ge=1, le=99)


whole = litellm.completion(messages=HELLO, max_tokens=16, **ARGS)
text = whole.choices[0].message.content
assert text and whole.usage.completion_tokens > 0
chunks = litellm.completion(messages=HELLO, max_tokens=16, stream=True, **ARGS)
assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text

parsed = litellm.completion(messages=HELLO, max_tokens=200, response_format=City, **ARGS)
City.model_validate_json(parsed.choices[0].message.content)

tool = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 12}},
            "required": ["city"],
        },
    },
}
called = litellm.completion(messages=HELLO, max_tokens=200, tools=[tool], tool_choice="required", **ARGS)
call = called.choices[0].message.tool_calls[0]
assert call.function.name == "weather" and "city" in json.loads(call.function.arguments)

ARGS["model"] = "text-completion-openai/smollm2"
plain = litellm.text_completion(prompt="An isthmus is", max_tokens=8, **ARGS)
assert plain.choices[0].text
