import json
import os

from openai import OpenAI, pydantic_function_tool
from pydantic import BaseModel

client = OpenAI(base_url=os.environ["BASE"] + "/v1", api_key="none")
model = client.models.list().data[0].id
messages = [{"role": "developer", "content": "Answer in one sentence."}, {"role": "user", "content": "Who are you?"}]
done = client.chat.completions.create(model=model, messages=messages, max_completion_tokens=30)
assert done.choices[0].message.content and done.usage.completion_tokens <= 30
stream = client.chat.completions.create(
    model=model, messages=messages, max_tokens=30, stream=True, stream_options={"include_usage": True}
)
chunks = list(stream)
assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) and chunks[-1].usage.total_tokens
assert client.completions.create(model=model, prompt="The sky is").choices[0].text
response = client.responses.create(model=model, input="Who are you?", instructions="Be brief.", max_output_tokens=20)
assert response.output_text
with client.responses.stream(model=model, input="Say hi.", temperature=0, max_output_tokens=2000) as events:
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert events.get_final_response().output_text


class City(BaseModel):
    name: str
    population: int


def weather(city: str) -> str:
    return f"sunny in {city}"


schema = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 40}}, "required": ["city"]}
tools = [
    {"type": "function", "function": {"name": "weather", "description": "Weather of a city", "parameters": schema}}
]
question = [{"role": "user", "content": "What is the weather in Paris?"}]
asked = {"model": model, "messages": question, "tools": tools, "max_tokens": 100}
message = client.chat.completions.create(**asked, tool_choice="required", parallel_tool_calls=False).choices[0].message
[call] = message.tool_calls
result = {"role": "tool", "tool_call_id": call.id, "content": weather(**json.loads(call.function.arguments))}
done = client.chat.completions.create(**asked | {"messages": [*question, message, result]})
assert done.choices[0].message.content or done.choices[0].message.tool_calls
with client.chat.completions.stream(**asked, tool_choice="required", parallel_tool_calls=False) as events:
    kinds = {event.type for event in events}
    final = events.get_final_completion().choices[0]
assert "tool_calls.function.arguments.delta" in kinds and final.finish_reason == "tool_calls"
weather(**json.loads(final.message.tool_calls[0].function.arguments))
strict = pydantic_function_tool(City)
made = client.chat.completions.parse(
    model=model, messages=[{"role": "user", "content": "Describe Paris."}], tools=[strict], tool_choice="required",
    parallel_tool_calls=False, max_tokens=200,
)  # fmt: skip
assert isinstance(made.choices[0].message.tool_calls[0].function.parsed_arguments, City)
parsed = client.chat.completions.parse(
    model=model, messages=[{"role": "user", "content": "Describe Paris."}], response_format=City, max_tokens=200
)
assert isinstance(parsed.choices[0].message.parsed, City)
own = {"type": "function", "name": "weather", "parameters": schema}
response = client.responses.create(model=model, input=question, tools=[own], tool_choice="required")
calls = [item for item in response.output if item.type == "function_call"]
results = [{"type": "function_call_output", "call_id": one.call_id, "output": "sunny"} for one in calls]
again = client.responses.create(model=model, input=[*question, *calls, *results], tools=[own], max_output_tokens=50)
assert calls and again.output
assert isinstance(client.responses.parse(model=model, input="Describe Paris.", text_format=City).output_parsed, City)
