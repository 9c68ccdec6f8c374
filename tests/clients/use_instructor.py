import os

import instructor
from openai import OpenAI

client = instructor.from_openai(OpenAI(base_url=os.environ["BASE"] + "/v1", api_key="none"))
done = client.chat.completions.create(
    model=os.environ["MODEL"], messages=[{"role": "user", "content": "Say hi."}], response_model=None, max_tokens=20
)
assert done.choices[0].message.content
