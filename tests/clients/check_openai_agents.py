"""OpenAI Agents SDK: chat completions and responses, a structured answer, a tool that must be called, a stream."""

import asyncio
import sys

from agents import (
    Agent,
    AsyncOpenAI,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from pydantic import BaseModel, Field

set_tracing_disabled(True)
client = AsyncOpenAI(base_url=f"{sys.argv[1]}/v1", api_key="none", max_retries=0, timeout=120)
CALLS = []


class City(BaseModel):
    name: str = Field(max_length=12)
    million: int = Field(ge=1, le=99)


@function_tool
def weather(city: str) -> str:
    """The weather of a city."""
    CALLS.append(city)
    return f"Sunny in {city}."


async def main() -> None:
    for kind in (OpenAIChatCompletionsModel, OpenAIResponsesModel):
        model = kind(model="smollm2", openai_client=client)
        short = ModelSettings(temperature=0, max_tokens=200)
        plain = Agent(name="plain", instructions="Be brief.", model=model, model_settings=short)
        whole = await Runner.run(plain, "Say hello.")
        assert whole.final_output
        streamed = Runner.run_streamed(plain, "Say hello.")
        assert [event async for event in streamed.stream_events()]
        assert streamed.final_output == whole.final_output
        long = ModelSettings(temperature=0, max_tokens=200)
        told = await Runner.run(
            Agent(name="city", instructions="Name a city.", model=model, model_settings=long, output_type=City), "Go."
        )
        assert isinstance(told.final_output, City)
        CALLS.clear()
        must = ModelSettings(temperature=0, max_tokens=200, tool_choice="required")
        agent = Agent(
            name="caller",
            instructions="Use the tool.",
            model=model,
            model_settings=must,
            tools=[weather],
            tool_use_behavior="stop_on_first_tool",
        )
        called = await Runner.run(agent, "Weather in Oslo?")
        assert CALLS and str(called.final_output).startswith("Sunny"), (CALLS, called.final_output)


asyncio.run(main())
