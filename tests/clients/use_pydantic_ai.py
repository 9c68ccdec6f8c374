import asyncio
import os

from pydantic import BaseModel, Field
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.exceptions import UsageLimitExceeded
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.usage import UsageLimits


class City(BaseModel):
    name: str = Field(max_length=40)
    population: int


provider = OpenAIProvider(base_url=os.environ["BASE"] + "/v1", api_key="none")
model = OpenAIChatModel(os.environ["MODEL"], provider=provider)
agent = Agent(model, instructions="Be brief.")
first = agent.run_sync("Who are you?", model_settings={"max_tokens": 30})
assert first.output
assert agent.run_sync("And me?", message_history=first.all_messages(), model_settings={"max_tokens": 30}).output
for kind in (City, NativeOutput(City)):  # by a tool that is required, and by a JSON schema
    made = Agent(model, output_type=kind).run_sync("Describe Paris.", model_settings={"max_tokens": 200})
    assert isinstance(made.output, City)


async def streamed() -> None:
    async with Agent(model, output_type=City).run_stream("Describe Paris.", model_settings={"max_tokens": 200}) as run:
        assert isinstance(await run.get_output(), City)


asyncio.run(streamed())
asked = []
helper = Agent(model, output_type=City)


@helper.tool_plain
def population(city: str) -> int:
    """How many people live in a city."""
    asked.append(city)
    return 2_100_000


settings = {"max_tokens": 200, "extra_body": {"tool_choice": {"type": "function", "function": {"name": "population"}}}}
try:  # the model would ask for ever
    helper.run_sync("Describe Paris.", model_settings=settings, usage_limits=UsageLimits(request_limit=2))
except UsageLimitExceeded:
    assert len(asked) == 2
else:
    raise AssertionError("the tool was not asked for")
