// The OpenAI SDK for Node where requests are refused, and where it tries again of its own accord.
//
// errors.mjs URL SDK KEY LIMITED BRIEF, with keys on: KEY may use every model, LIMITED none of these, BRIEF may ask 20
// times a minute. `demo` is cold, `asleep` is suspended, `hasty` gives an answer one second.
import assert from "node:assert/strict";
import { createRequire } from "node:module";

const [url, installed, key, limited, brief] = process.argv.slice(2);
const { default: OpenAI } = createRequire(`${installed}/package.json`)("openai");
const ask = { model: "demo", prompt: "ROMEO:", max_tokens: 16, temperature: 0 };
const endless = { ...ask, model: "hasty", max_tokens: 8000, ignore_eos: true };
let sent = [];
let came = [];
const counted = async (...request) => {
  sent.push(performance.now());
  const answer = await fetch(...request);
  came.push([performance.now(), answer.headers.get("retry-after")]);
  return answer;
};
const client = (options = {}) =>
  new OpenAI({ baseURL: `${url}/v1`, apiKey: key, timeout: 60_000, maxRetries: 0, fetch: counted, ...options });

// The error is of this class and carries this, after exactly so many requests.
const rejects = async (call, kind, { status, code, tries = 1 }) => {
  [sent, came] = [[], []];
  const error = await call().then(() => assert.fail(`no ${kind.name}`), (error) => error);
  assert.equal(error.constructor, kind, `${error.stack}`);
  assert.equal(error.status, status);
  assert.equal(error.code ?? undefined, code);
  assert.equal(sent.length, tries, `${error}`);
  return error;
};
// Between an answer that says when to come again and the next request lies that time.
const waitedAsTold = () => {
  for (const [place, again] of sent.slice(1).entries()) {
    const [answered, retryAfter] = came[place];
    assert(Number(retryAfter) >= 1 && Number(retryAfter) <= 60, retryAfter);
    assert(again - answered >= 1000 * Number(retryAfter) - 10, `${retryAfter} ${again - answered}`);
  }
};

// Who may call. These are not tried again, however many tries are allowed.
const stranger = client({ apiKey: "plk-none", maxRetries: 2 });
const unknownKey = { status: 401, code: "invalid_api_key" };
await rejects(() => stranger.completions.create(ask), OpenAI.AuthenticationError, unknownKey);
await rejects(() => stranger.models.list(), OpenAI.AuthenticationError, unknownKey);
const bob = client({ apiKey: limited, maxRetries: 2 });
const notAllowed = { status: 403, code: "model_not_allowed" };
await rejects(() => bob.completions.create(ask), OpenAI.PermissionDeniedError, notAllowed);

// What is asked for.
const many = client({ maxRetries: 2 });
const unknownModel = { status: 404, code: "model_not_found" };
const nobody = { ...ask, model: "nobody" };
await rejects(() => many.completions.create(nobody), OpenAI.NotFoundError, unknownModel);
await rejects(() => many.completions.create({ ...nobody, stream: true }), OpenAI.NotFoundError, unknownModel);
await rejects(() => many.models.retrieve("nobody"), OpenAI.NotFoundError, unknownModel);
const embed = () => many.embeddings.create({ model: "demo", input: "x" });
await rejects(embed, OpenAI.NotFoundError, { status: 404, code: "not_found" });
const freezing = () => many.completions.create({ ...ask, temperature: -1 });
const bad = await rejects(freezing, OpenAI.BadRequestError, { status: 400, code: "bad_request" });
assert.deepEqual([bad.param, bad.type], ["temperature", "invalid_request_error"]);
const large = () => many.completions.create({ ...ask, prompt: "x".repeat(17 << 20) });
await rejects(large, OpenAI.APIError, { status: 413, code: "body_too_large" });

// A 503 is tried again as often as allowed, after the time that it says.
const asleep = { ...ask, model: "asleep" };
const suspended = { status: 503, code: "suspended" };
const told = await rejects(() => client().completions.create(asleep), OpenAI.InternalServerError, suspended);
assert.equal(told.type, "server_error");
assert(Number(told.headers.get("retry-after")) >= 1);
const once = client({ maxRetries: 1 });
await rejects(() => once.completions.create(asleep), OpenAI.InternalServerError, { ...suspended, tries: 2 });
waitedAsTold();

// And then the answer comes: a cold model that one may not wait for is woken all the same.
[sent, came] = [[], []];
const patient = client({ maxRetries: 20, defaultHeaders: { "x-pilotlight-cold-start": "reject" } });
const answer = await patient.completions.create(ask);
assert.equal(answer.usage.completion_tokens, 16);
assert(sent.length >= 2, `${sent}`);
waitedAsTold();

// A key over its limit is told when there is room again, and the SDK comes back then.
const carol = client({ apiKey: brief });
const over = async () => {
  // What it asks for is refused at once.
  for (let asked = 0; asked < 500; asked += 1) {
    const error = await carol.completions.create(asleep).then(() => assert.fail("no error"), (error) => error);
    if (error instanceof OpenAI.RateLimitError) return error;
    assert.equal(error.constructor, OpenAI.InternalServerError, `${error.stack}`);
  }
  return assert.fail("no RateLimitError");
};
const limit = await over();
assert.deepEqual([limit.status, limit.code, limit.type], [429, "rate_limit_exceeded", "rate_limit_error"]);
assert(Number(limit.headers.get("retry-after")) >= 1 && Number(limit.headers.get("retry-after")) <= 5);
// A slow machine may have made room before the first try.
let cameBack = false;
for (let round = 0; round < 10 && !cameBack; round += 1) {
  await over();
  [sent, came] = [[], []];
  const answer = await client({ apiKey: brief, maxRetries: 5 }).completions.create(ask);
  assert.equal(answer.usage.completion_tokens, 16);
  waitedAsTold();
  cameBack = sent.length > 1;
}
assert(cameBack, "it never had to come back");

// Time-outs of the client's own, tried again too; and the server's, told in the middle of a stream.
const impatient = client({ timeout: 50, maxRetries: 1 });
const none = { status: undefined, code: undefined, tries: 2 };
await rejects(() => impatient.completions.create(endless), OpenAI.APIConnectionTimeoutError, none);
const late = { status: 504, code: "timeout" };
await rejects(() => client().completions.create(endless), OpenAI.InternalServerError, late);
let said = "";
const streamed = async () => {
  const stream = await client().completions.create({ ...endless, stream: true });
  for await (const chunk of stream) said += chunk.choices[0].text;
};
await rejects(streamed, OpenAI.APIError, { status: undefined, code: "timeout" });
assert(said, "a stream that was cut had begun");

// An abort signal of the caller's closes the stream.
const caller = new AbortController();
const long = { ...ask, max_tokens: 900, ignore_eos: true, stream: true };
const stream = await client().completions.create(long, { signal: caller.signal });
await stream[Symbol.asyncIterator]().next();
caller.abort();
console.log("node: ok");
