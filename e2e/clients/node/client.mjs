// The OpenAI SDK for Node against a running Pilotlight: client.mjs URL SDK, with a model `demo`.
import assert from "node:assert/strict";
import { createRequire } from "node:module";

const [url, installed] = process.argv.slice(2);
const { default: OpenAI } = createRequire(`${installed}/package.json`)("openai");
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", timeout: 60_000 });
const ask = { model: "demo", prompt: "ROMEO:", max_tokens: 16, temperature: 0 };
const say = { model: "demo", messages: [{ role: "user", content: "Good morrow!" }], max_tokens: 16, seed: 3 };

const names = [];
for await (const model of client.models.list()) names.push(model.id);
assert(names.includes("demo"));

const whole = await client.completions.create(ask);
const text = whole.choices[0].text;
assert.equal(whole.usage.completion_tokens, 16);
let streamed = "";
let last;
for await (const chunk of await client.completions.create({ ...ask, stream: true, stream_options: { include_usage: true } })) {
  streamed += chunk.choices[0]?.text ?? "";
  last = chunk;
}
assert.equal(streamed, text);
assert.deepEqual(last.choices, []);
assert.deepEqual(last.usage, whole.usage);
const ids = await client.completions.create({ ...ask, prompt: [5, 6, 7] });
assert.equal(ids.usage.prompt_tokens, 3);
const both = await client.completions.create({ ...ask, prompt: [[5, 6, 7], [8, 9]] });
assert.deepEqual(both.choices.map((c) => c.index), [0, 1]);
assert.equal(both.choices[0].text, ids.choices[0].text);

const stop = text.slice(3, 6);
const stopped = (await client.completions.create({ ...ask, stop: [stop] })).choices[0];
assert.equal(stopped.finish_reason, "stop");
assert.equal(stopped.text, text.slice(0, text.indexOf(stop)));
const probs = (await client.completions.create({ ...ask, logprobs: 3 })).choices[0].logprobs;
assert.equal(probs.token_logprobs.length, 16);
assert(probs.top_logprobs.every((top) => Object.keys(top).length >= 3));
const sampled = { ...ask, temperature: 0.9, seed: 7, n: 2 };
const texts = async () => (await client.completions.create(sampled)).choices.map((c) => c.text);
const drawn = await texts();
assert.deepEqual(await texts(), drawn);
assert.notEqual(drawn[0], drawn[1]);
const parts = ["", ""];
for await (const chunk of await client.completions.create({ ...sampled, stream: true })) {
  for (const choice of chunk.choices) parts[choice.index] += choice.text;
}
assert.deepEqual(parts, drawn);

const chat = await client.chat.completions.create({ ...say, logprobs: true, top_logprobs: 2 });
assert(chat.choices[0].logprobs.content[0].top_logprobs.length >= 2);
let content = "";
const counted = { ...say, stream: true, stream_options: { include_usage: true } };
for await (const chunk of await client.chat.completions.create(counted)) {
  content += chunk.choices[0]?.delta?.content ?? "";
  last = chunk;
}
assert.equal(content, chat.choices[0].message.content);
assert.deepEqual([last.choices, last.usage], [[], chat.usage]);
const pair = await client.chat.completions.create({ ...say, n: 2 });
assert.equal(pair.choices.length, 2);
assert.equal(pair.choices[0].message.content, content);

// An answer that keeps to a JSON schema.
const schema = {
  type: "object",
  properties: { a: { type: "integer", minimum: 0, maximum: 9 } },
  required: ["a"],
  additionalProperties: false,
};
const digit = { type: "json_schema", json_schema: { name: "digit", schema } };
const told = await client.chat.completions.create({ ...say, max_tokens: 60, temperature: 0, response_format: digit });
const answer = JSON.parse(told.choices[0].message.content);
assert.deepEqual(Object.keys(answer), ["a"]);
assert(Number.isInteger(answer.a) && answer.a >= 0 && answer.a <= 9, told.choices[0].message.content);

// Closing a stream; the test that runs this looks at the gauge of sessions.
const slow = { ...ask, max_tokens: 900, ignore_eos: true };
const long = await client.completions.create({ ...slow, stream: true });
await long[Symbol.asyncIterator]().next();
long.controller.abort();
console.log("node: ok");
