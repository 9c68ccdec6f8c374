import os

import instructor
from openai import OpenAI
from pydantic import BaseModel, Field


class User(BaseModel):
    name: str = Field(max_length=40)
    age: int


client = instructor.from_openai(OpenAI(base_url=os.environ["BASE"] + "/v1", api_key="none"))
done = client.chat.completions.create(
    model=os.environ["MODEL"], messages=[{"role": "user", "content": "Say hi."}], response_model=None, max_tokens=20
)
assert done.choices[0].message.content
asked = {"model": os.environ["MODEL"], "response_model": User, "max_tokens": 200}
asked["messages"] = [{"role": "user", "content": "John Doe is 25 years old."}]
assert isinstance(client.chat.completions.create(**asked), User)  # by a tool that is named
parts = list(client.chat.completions.create_partial(**asked))
assert len(parts) > 1 and parts[-1].name
for mode in (instructor.Mode.JSON_SCHEMA, instructor.Mode.TOOLS_STRICT):
    other = instructor.from_openai(OpenAI(base_url=os.environ["BASE"] + "/v1", api_key="none"), mode=mode)
    assert isinstance(other.chat.completions.create(**asked), User)
