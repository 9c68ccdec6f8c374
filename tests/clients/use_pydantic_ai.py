import os

from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

provider = OpenAIProvider(base_url=os.environ["BASE"] + "/v1", api_key="none")
agent = Agent(OpenAIChatModel(os.environ["MODEL"], provider=provider), instructions="Be brief.")
first = agent.run_sync("Who are you?", model_settings={"max_tokens": 30})
assert first.output
assert agent.run_sync("And me?", message_history=first.all_messages(), model_settings={"max_tokens": 30}).output
