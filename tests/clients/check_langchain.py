"""LangChain: invoke, stream, structured output by all three methods, bound tools and their results."""

import sys

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field

model = ChatOpenAI(
    model="smollm2", base_url=f"{sys.argv[1]}/v1", api_key="none", temperature=0, max_tokens=200, max_retries=0
)


class City(BaseModel):
    """A city."""

    name: str = Field(max_length=12)
    million: int = Field(ge=1, le=99)


@tool
def weather(city: str) -> str:
    """The weather of a city."""
    return f"Sunny in {city}."


short = model.bind(max_tokens=16)
whole = short.invoke("Say hello.")
assert whole.content and whole.usage_metadata["output_tokens"] > 0
assert "".join(chunk.content for chunk in short.stream("Say hello.")) == whole.content

for method in ("json_schema", "function_calling"):
    got = model.with_structured_output(City, method=method).invoke("Tell me about a city.")
    assert isinstance(got, City), (method, got)
got = model.with_structured_output(City.model_json_schema(), method="json_mode", include_raw=True).invoke(
    'Answer in JSON: {"name": "Oslo", "million": 1}'
)
assert "raw" in got and got["raw"].content.lstrip().startswith("{")

question = HumanMessage("What is the weather in Oslo?")
called = model.bind_tools([weather], tool_choice="any").invoke([question])
assert called.tool_calls and called.tool_calls[0]["name"] == "weather" and "city" in called.tool_calls[0]["args"]
result = weather.invoke(called.tool_calls[0])
assert isinstance(result, ToolMessage)
answer = model.bind_tools([weather], tool_choice="none").bind(max_tokens=16).invoke([question, called, result])
assert not answer.tool_calls
