"""The OpenAI SDK for Python against a running Pilotlight: client.py URL, with a model `demo`."""

import json
import sys

import openai

url = sys.argv[1]
client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", timeout=60)
ask = {"model": "demo", "prompt": "ROMEO:", "max_tokens": 16, "temperature": 0}
say = {"model": "demo", "messages": [{"role": "user", "content": "Good morrow!"}], "max_tokens": 16}


def raises(kind, **request):
    try:
        client.completions.create(**request)
    except kind as error:
        return error
    raise AssertionError(f"no {kind.__name__} for {request}")


assert "demo" in [m.id for m in client.models.list()]
assert client.models.retrieve("demo").id == "demo"

# Completions: the same text whole, streamed, and from a list of token ids of the same prompt.
whole = client.completions.create(**ask)
text = whole.choices[0].text
assert text and whole.usage.completion_tokens == 16, whole
chunks = list(client.completions.create(**ask, stream=True, stream_options={"include_usage": True}))
assert "".join(c.choices[0].text for c in chunks if c.choices) == text
assert chunks[-1].choices == [] and chunks[-1].usage == whole.usage, chunks[-1]
ids = client.completions.create(**{**ask, "prompt": [5, 6, 7]})
assert ids.usage.prompt_tokens == 3, ids.usage

# Stop, log-probabilities, n, seeds.
stop = text[3:6]
stopped = client.completions.create(**ask, stop=[stop]).choices[0]
assert stopped.finish_reason == "stop" and stopped.text == text[: text.index(stop)], stopped
probs = client.completions.create(**ask, logprobs=3).choices[0].logprobs
assert len(probs.token_logprobs) == 16 and all(len(t) >= 3 for t in probs.top_logprobs), probs
sampled = {**ask, "temperature": 0.9, "seed": 7, "n": 2}
first, again = (client.completions.create(**sampled).choices for _ in range(2))
assert [c.text for c in first] == [c.text for c in again] and len(first) == 2
assert {c.index for c in first} == {0, 1}

# Chat, whole and streamed.
chat = client.chat.completions.create(**say, seed=3, logprobs=True, top_logprobs=2)
content = chat.choices[0].message.content
assert content and len(chat.choices[0].logprobs.content[0].top_logprobs) >= 2, chat
parts = client.chat.completions.create(**say, seed=3, stream=True)
assert "".join(c.choices[0].delta.content or "" for c in parts if c.choices) == content

# An answer that keeps to a JSON schema.
schema = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["a"],
    "additionalProperties": False,
}
wanted = {"type": "json_schema", "json_schema": {"name": "digit", "schema": schema}}
told = client.chat.completions.create(**{**say, "max_tokens": 60}, temperature=0, response_format=wanted)
answer = json.loads(told.choices[0].message.content)
assert list(answer) == ["a"] and answer["a"] in range(10), answer

# Each error has the SDK's class.
missing = raises(openai.NotFoundError, **{**ask, "model": "nobody"})
assert missing.code == "model_not_found", missing
bad = raises(openai.BadRequestError, **{**ask, "temperature": -1})
assert bad.code == "bad_request", bad
impatient = client.with_options(timeout=0.05, max_retries=0)
try:
    impatient.completions.create(**{**ask, "max_tokens": 900}, extra_body={"ignore_eos": True})
except openai.APITimeoutError:
    pass
else:
    raise AssertionError("no time-out")

# Closing a stream; the test that runs this looks at the gauge of sessions.
long = client.completions.create(**{**ask, "max_tokens": 900}, stream=True, extra_body={"ignore_eos": True})
next(iter(long))
long.close()
print("python: ok")
