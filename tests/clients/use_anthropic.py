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
