import os

import litellm

asked = {"model": "openai/" + os.environ["MODEL"], "api_base": os.environ["BASE"] + "/v1", "api_key": "none"}
asked["messages"] = [{"role": "user", "content": "Who are you?"}]
assert litellm.completion(**asked, max_tokens=20).choices[0].message.content
chunks = litellm.completion(**asked, max_tokens=20, stream=True)
assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
try:
    litellm.completion(**asked | {"messages": [{"role": "user", "content": "word " * 20000}]})
except litellm.ContextWindowExceededError:
    pass
else:
    raise AssertionError("an overflow was not recognised")
