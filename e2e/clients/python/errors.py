"""The OpenAI SDK for Python where requests are refused, and where it tries again of its own accord.

errors.py URL KEY LIMITED BRIEF, with keys on: KEY may use every model, LIMITED none of these, BRIEF may ask 20 times a
minute. `demo` is cold, `asleep` is suspended, `hasty` gives an answer one second.
"""

import asyncio
import sys
import time

import openai

url, key, limited, brief = sys.argv[1:]
ask = {"model": "demo", "prompt": "ROMEO:", "max_tokens": 16, "temperature": 0}
endless = {"max_tokens": 8000, "extra_body": {"ignore_eos": True}}
sent, came = [], []
hooks = {
    "request": [lambda request: sent.append(time.monotonic())],
    "response": [lambda response: came.append((time.monotonic(), response.headers.get("retry-after")))],
}
http = openai.DefaultHttpxClient(event_hooks=hooks)
client = openai.OpenAI(base_url=f"{url}/v1", api_key=key, timeout=60, max_retries=0, http_client=http)


def raises(kind, call, *, status, code, tries=1):
    """The error is of this class and carries this, after exactly so many requests."""
    sent.clear(), came.clear()
    try:
        call()
    except openai.APIError as error:
        assert type(error) is kind, (type(error), error)
        assert (getattr(error, "status_code", None), error.code) == (status, code), (status, error.code)
        assert len(sent) == tries, (len(sent), error)
        return error
    raise AssertionError(f"no {kind.__name__}")


def waited_as_told():
    """Between an answer that says when to come again and the next request lies that time."""
    for (answered, retry_after), again in zip(came, sent[1:]):
        assert 1 <= int(retry_after) <= 60, retry_after
        assert again - answered >= int(retry_after) - 0.01, (retry_after, again - answered)


def completion(client=client, **more):
    return lambda: client.completions.create(**{**ask, **more})


# Who may call. These are not tried again, however many tries are allowed.
stranger = client.with_options(api_key="plk-none", max_retries=2)
raises(openai.AuthenticationError, completion(stranger), status=401, code="invalid_api_key")
raises(openai.AuthenticationError, stranger.models.list, status=401, code="invalid_api_key")
bob = client.with_options(api_key=limited, max_retries=2)
raises(openai.PermissionDeniedError, completion(bob), status=403, code="model_not_allowed")

# What is asked for.
many = client.with_options(max_retries=2)
raises(openai.NotFoundError, completion(many, model="nobody"), status=404, code="model_not_found")
raises(openai.NotFoundError, completion(many, model="nobody", stream=True), status=404, code="model_not_found")
raises(openai.NotFoundError, lambda: many.models.retrieve("nobody"), status=404, code="model_not_found")
raises(openai.NotFoundError, lambda: many.embeddings.create(model="demo", input="x"), status=404, code="not_found")
bad = raises(openai.BadRequestError, completion(many, temperature=-1), status=400, code="bad_request")
assert bad.param == "temperature" and bad.type == "invalid_request_error", bad
raises(openai.APIStatusError, completion(many, prompt="x" * (17 << 20)), status=413, code="body_too_large")

# A 503 is tried again as often as allowed, after the time that it says.
asleep = {"model": "asleep"}
error = raises(openai.InternalServerError, completion(**asleep), status=503, code="suspended")
assert error.type == "server_error" and 1 <= int(error.response.headers["retry-after"]) <= 60, error
once = client.with_options(max_retries=1)
raises(openai.InternalServerError, completion(once, **asleep), status=503, code="suspended", tries=2)
waited_as_told()

# And then the answer comes: a cold model that one may not wait for is woken all the same.
sent.clear(), came.clear()
patient = client.with_options(max_retries=20, default_headers={"x-pilotlight-cold-start": "reject"})
answer = patient.completions.create(**ask)
assert answer.usage.completion_tokens == 16 and len(sent) >= 2, (answer, sent)
waited_as_told()

# A key over its limit is told when there is room again, and the SDK comes back then.
carol = client.with_options(api_key=brief)


def over():
    """Asks until it is too much; what it asks for is refused at once."""
    for _ in range(500):
        try:
            carol.completions.create(**{**ask, **asleep})
        except openai.RateLimitError as error:
            return error
        except openai.InternalServerError:
            pass
    raise AssertionError("no RateLimitError")


error = over()
assert (error.status_code, error.code, error.type) == (429, "rate_limit_exceeded", "rate_limit_error"), error
assert 1 <= int(error.response.headers["retry-after"]) <= 5, error.response.headers
for _ in range(10):
    over()
    sent.clear(), came.clear()
    answer = carol.with_options(max_retries=5).completions.create(**ask)
    assert answer.usage.completion_tokens == 16, answer
    waited_as_told()
    # A slow machine may have made room before the first try.
    if len(sent) > 1:
        break
else:
    raise AssertionError("it never had to come back")

# Time-outs of the client's own, tried again too; and the server's, told in the middle of a stream.
impatient = client.with_options(timeout=0.05, max_retries=1)
raises(openai.APITimeoutError, completion(impatient, model="hasty", **endless), status=None, code=None, tries=2)
raises(openai.InternalServerError, completion(model="hasty", **endless), status=504, code="timeout")
said = []


def streamed():
    for chunk in client.completions.create(**{**ask, "model": "hasty", **endless}, stream=True):
        said.append(chunk.choices[0].text)


raises(openai.APIError, streamed, status=None, code="timeout")
assert "".join(said), "a stream that was cut had begun"


# A task that is cancelled closes its stream.
async def cancelled():
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, timeout=60) as others:
        stream = await others.completions.create(**{**ask, **endless, "max_tokens": 900}, stream=True)
        began = asyncio.Event()

        async def read():
            async for _ in stream:
                began.set()

        reader = asyncio.create_task(read())
        await asyncio.wait_for(began.wait(), 60)
        reader.cancel()
        await asyncio.gather(reader, return_exceptions=True)
        assert reader.cancelled(), reader


asyncio.run(cancelled())
print("python: ok")
