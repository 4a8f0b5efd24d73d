"""The OpenAI SDK for Python against a running Pilotlight: client.py URL, with a model `demo`."""

import json
import sys

import openai

url = sys.argv[1]
client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", timeout=60)
ask = {"model": "demo", "prompt": "ROMEO:", "max_tokens": 16, "temperature": 0}
say = {"model": "demo", "messages": [{"role": "user", "content": "Good morrow!"}], "max_tokens": 16}

assert "demo" in [m.id for m in client.models.list()]
assert client.models.retrieve("demo").id == "demo"

# Completions: the same text whole, streamed, and from a list of token ids of the same prompt.
whole = client.completions.create(**ask)
text = whole.choices[0].text
assert text and whole.usage.completion_tokens == 16, whole
chunks = list(client.completions.create(**ask, stream=True, stream_options={"include_usage": True}))
assert "".join(c.choices[0].text for c in chunks if c.choices) == text
assert all(c.usage is None for c in chunks[:-1]) and chunks[-2].choices[0].finish_reason == "length", chunks
assert chunks[-1].choices == [] and chunks[-1].usage == whole.usage, chunks[-1]
ids = client.completions.create(**{**ask, "prompt": [5, 6, 7]})
assert ids.usage.prompt_tokens == 3, ids.usage
both = client.completions.create(**{**ask, "prompt": [[5, 6, 7], [8, 9]]})
assert [c.index for c in both.choices] == [0, 1] and both.choices[0].text == ids.choices[0].text, both
assert both.usage.prompt_tokens == 5, both.usage
listed = client.completions.create(**{**ask, "prompt": [ask["prompt"], "JULIET:"]})
assert len(listed.choices) == 2 and listed.choices[0].text == text, listed

# Stop, log-probabilities, n, seeds.
stop = text[3:6]
stopped = client.completions.create(**ask, stop=[stop]).choices[0]
assert stopped.finish_reason == "stop" and stopped.text == text[: text.index(stop)], stopped
probs = client.completions.create(**ask, logprobs=3).choices[0].logprobs
assert len(probs.token_logprobs) == 16 and all(len(t) >= 3 for t in probs.top_logprobs), probs
sampled = {**ask, "temperature": 0.9, "seed": 7, "n": 2}
first, again = (client.completions.create(**sampled).choices for _ in range(2))
assert [c.text for c in first] == [c.text for c in again] and len(first) == 2
assert {c.index for c in first} == {0, 1} and first[0].text != first[1].text, first
other = client.completions.create(**{**sampled, "seed": 8}).choices
assert [c.text for c in other] != [c.text for c in first], other
parts = ["", ""]
for chunk in client.completions.create(**sampled, stream=True):
    for choice in chunk.choices:
        parts[choice.index] += choice.text
assert parts == [c.text for c in first], parts

# Chat, whole and streamed.
chat = client.chat.completions.create(**say, seed=3, logprobs=True, top_logprobs=2)
content = chat.choices[0].message.content
assert content and len(chat.choices[0].logprobs.content[0].top_logprobs) >= 2, chat
parts = list(client.chat.completions.create(**say, seed=3, stream=True, stream_options={"include_usage": True}))
assert "".join(c.choices[0].delta.content or "" for c in parts if c.choices) == content
assert parts[0].choices[0].delta.role == "assistant" and parts[-1].usage == chat.usage, parts
pair = client.chat.completions.create(**say, seed=3, n=2)
assert [c.index for c in pair.choices] == [0, 1] and pair.choices[0].message.content == content, pair
part = {"role": "user", "content": [{"type": "text", "text": "Good morrow!"}]}
assert client.chat.completions.create(**{**say, "messages": [part]}, seed=3).choices[0].message.content == content

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

# Closing a stream; the test that runs this looks at the gauge of sessions.
long = client.completions.create(**{**ask, "max_tokens": 900}, stream=True, extra_body={"ignore_eos": True})
next(iter(long))
long.close()
print("python: ok")
