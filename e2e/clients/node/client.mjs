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
assert.equal((await client.completions.create({ ...ask, prompt: [5, 6, 7] })).usage.prompt_tokens, 3);

const stop = text.slice(3, 6);
const stopped = (await client.completions.create({ ...ask, stop: [stop] })).choices[0];
assert.equal(stopped.finish_reason, "stop");
assert.equal(stopped.text, text.slice(0, text.indexOf(stop)));
const probs = (await client.completions.create({ ...ask, logprobs: 3 })).choices[0].logprobs;
assert.equal(probs.token_logprobs.length, 16);
const sampled = { ...ask, temperature: 0.9, seed: 7, n: 2 };
const texts = async () => (await client.completions.create(sampled)).choices.map((c) => c.text);
assert.deepEqual(await texts(), await texts());

const chat = await client.chat.completions.create(say);
let content = "";
for await (const chunk of await client.chat.completions.create({ ...say, stream: true })) {
  content += chunk.choices[0]?.delta?.content ?? "";
}
assert.equal(content, chat.choices[0].message.content);

await assert.rejects(client.completions.create({ ...ask, model: "nobody" }), OpenAI.NotFoundError);
await assert.rejects(client.completions.create({ ...ask, temperature: -1 }), OpenAI.BadRequestError);
const slow = { ...ask, max_tokens: 900, ignore_eos: true };
await assert.rejects(client.completions.create(slow, { timeout: 50, maxRetries: 0 }), OpenAI.APIConnectionTimeoutError);

const long = await client.completions.create({ ...slow, stream: true });
await long[Symbol.asyncIterator]().next();
long.controller.abort();
console.log("node: ok");
