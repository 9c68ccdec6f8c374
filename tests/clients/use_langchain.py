import os
from functools import reduce
from operator import add

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field

model = ChatOpenAI(base_url=os.environ["BASE"] + "/v1", api_key="none", model=os.environ["MODEL"], max_tokens=20)
assert model.invoke("Who are you?").content
assert "".join(str(part.content) for part in model.stream([("system", "Be brief."), ("human", "Hi")]))
assert len(model.batch(["One?", "Two?"])) == 2
responses = ChatOpenAI(
    base_url=os.environ["BASE"] + "/v1", api_key="none", model=os.environ["MODEL"], use_responses_api=True
)
assert responses.invoke("Say hi.").text
try:
    model.invoke("word " * 20000)
except Exception as problem:
    assert "ContextOverflow" in "".join(kind.__name__ for kind in type(problem).__mro__), type(problem).__mro__
else:
    raise AssertionError("an overflow was not recognised")


class City(BaseModel):
    """A city."""

    name: str = Field(max_length=40)
    population: int


@tool
def multiply(a: int, b: int) -> int:
    """Multiply two numbers."""
    return a * b


base = {"base_url": os.environ["BASE"] + "/v1", "api_key": "none", "model": os.environ["MODEL"], "max_tokens": 200}
model = ChatOpenAI(**base)
for method in ("json_schema", "function_calling"):
    assert isinstance(model.with_structured_output(City, method=method).invoke("Describe Paris."), City)
bound = model.bind_tools([multiply], tool_choice="any", parallel_tool_calls=False)
said = bound.invoke("What is 3 times 4?")
assert said.tool_calls and isinstance(multiply.invoke(said.tool_calls[0]["args"]), int)
whole = reduce(add, bound.stream("What is 3 times 4?"))
assert whole.tool_calls[0]["args"].keys() == {"a", "b"} and len(whole.tool_call_chunks) == 1
told = [HumanMessage("What is 3 times 4?"), said, ToolMessage("12", tool_call_id=said.tool_calls[0]["id"])]
assert model.bind_tools([multiply]).invoke(told)
