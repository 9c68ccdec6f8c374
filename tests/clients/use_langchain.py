import os

from langchain_openai import ChatOpenAI

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
