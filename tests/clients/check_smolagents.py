"""smolagents' ToolCallingAgent: each step is a call that the agent can read and run. What is called is the model's."""

import sys

from smolagents import ActionStep, OpenAIModel, ToolCallingAgent, tool

model = OpenAIModel(model_id="smollm2", api_base=f"{sys.argv[1]}/v1", api_key="none", temperature=0, max_tokens=200)


@tool
def weather(city: str) -> str:
    """The weather of a city.

    Args:
        city: its name
    """
    return f"Sunny in {city}."


agent = ToolCallingAgent(tools=[weather], model=model, max_steps=2, verbosity_level=0)
agent.run("What is the weather in Oslo?")
steps = [step for step in agent.memory.steps if isinstance(step, ActionStep)]
called = [step for step in steps if step.tool_calls]
assert called, [(step.error, step.model_output) for step in steps]
assert all(call.name in {"weather", "final_answer"} for step in called for call in step.tool_calls)
