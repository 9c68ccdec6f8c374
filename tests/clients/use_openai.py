import os

from openai import OpenAI

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
with client.responses.stream(model=model, input="Say hi.", max_output_tokens=2000) as events:
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert events.get_final_response().output_text
