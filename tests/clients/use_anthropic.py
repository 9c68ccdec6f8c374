import os

from anthropic import Anthropic, NotFoundError

client = Anthropic(base_url=os.environ["BASE"], api_key="none")
asked = {"model": os.environ["MODEL"], "max_tokens": 40, "system": "Be brief."}
asked["messages"] = [{"role": "user", "content": "Who are you?"}]
message = client.messages.create(**asked)
assert message.content[0].text and message.usage.output_tokens <= 40
with client.messages.stream(**asked) as stream:
    text = "".join(stream.text_stream)
    assert text == stream.get_final_message().content[0].text and text
counted = client.messages.count_tokens(model=asked["model"], messages=asked["messages"])
assert counted.input_tokens > 0
try:
    client.messages.create(**asked | {"model": "none"})
except NotFoundError as problem:
    assert problem.body["error"]["type"] == "not_found_error"
else:
    raise AssertionError("a model that is not there was found")
schema = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 40}}, "required": ["city"]}
asked |= {"max_tokens": 200, "tools": [{"name": "weather", "description": "Weather of a city", "input_schema": schema}]}
asked["tool_choice"] = {"type": "any", "disable_parallel_tool_use": True}
message = client.messages.create(**asked)
[use] = message.content
assert message.stop_reason == "tool_use" and use.type == "tool_use" and isinstance(use.input["city"], str)
with client.messages.stream(**asked) as stream:
    assert isinstance(stream.get_final_message().content[0].input["city"], str)
result = {"type": "tool_result", "tool_use_id": use.id, "content": "sunny"}
asked["messages"] += [{"role": "assistant", "content": message.content}, {"role": "user", "content": [result]}]
assert client.messages.create(**asked | {"tool_choice": {"type": "auto"}}).content
