"""LlamaIndex: complete, chat, streams, structured output, tools."""

import sys

from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel, Field

llm = OpenAILike(
    model="smollm2",
    api_base=f"{sys.argv[1]}/v1",
    api_key="none",
    is_chat_model=True,
    is_function_calling_model=True,
    context_window=2048,
    temperature=0,
    max_tokens=200,
    max_retries=0,
)
HELLO = [ChatMessage(role="user", content="Say hello.")]


class City(BaseModel):
    """A city."""

    name: str = Field(max_length=12)
    million: int = Field(ge=1, le=99)


def weather(city: str) -> str:
    """The weather of a city."""
    return f"Sunny in {city}."


whole = llm.chat(HELLO, max_tokens=16).message.content
assert whole
assert "".join(chunk.delta or "" for chunk in llm.stream_chat(HELLO, max_tokens=16)) == whole
assert llm.complete("An isthmus is", max_tokens=8).text
got = llm.as_structured_llm(City).complete("Tell me about a city.").raw
assert isinstance(got, City), got
called = llm.chat_with_tools([FunctionTool.from_defaults(weather)], user_msg="Weather in Oslo?", tool_required=True)
calls = llm.get_tool_calls_from_response(called)
assert calls and calls[0].tool_name == "weather" and "city" in calls[0].tool_kwargs
