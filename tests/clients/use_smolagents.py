import os

from smolagents import OpenAIModel, ToolCallingAgent, tool


@tool
def weather(city: str) -> str:
    """Tells the weather of a city.

    Args:
        city: its name
    """
    return f"sunny in {city}"


base = {"model_id": os.environ["MODEL"], "api_base": os.environ["BASE"] + "/v1", "api_key": "none", "max_tokens": 200}
model = OpenAIModel(**base)
for streams in (False, True):
    agent = ToolCallingAgent(tools=[weather], model=model, max_steps=2, stream_outputs=streams)
    agent.run("What is the weather in Paris?")
    calls = [call for step in agent.memory.get_full_steps() for call in step.get("tool_calls") or []]
    assert calls and {call["function"]["name"] for call in calls} <= {"weather", "final_answer"}, calls
