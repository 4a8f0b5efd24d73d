#!/usr/bin/env python3
# Copyright The Pilotlight Authors
# SPDX-License-Identifier: Apache-2.0
"""Reference logits for the engine: small random checkpoints in Hugging Face layout, and what
transformers computes from them in f32.

    pip install -r models/demo/requirements.txt        # torch, transformers, tokenizers, safetensors, numpy
    python engine/tests/references/make_references.py [case ...] [--text] [--demo]

Without arguments every random case is made anew; --text and --demo need the trained demo model in
models/demo. The format is described in README.md. Same versions, same machine: same files.
"""
import argparse, hashlib, json, math, re, shutil
from pathlib import Path

import tokenizers
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

HERE = Path(__file__).resolve().parent
DEMO = HERE.parents[2] / "models" / "demo"
CONTINUATION = 16
EOS = 2


def llama(**more):
    c = dict(
        architectures=["LlamaForCausalLM"], model_type="llama", hidden_size=64, intermediate_size=128,
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16, hidden_act="silu",
        vocab_size=256, max_position_embeddings=512, rms_norm_eps=1e-5, rope_theta=10000.0, rope_scaling=None,
        attention_bias=False, mlp_bias=False, attention_dropout=0.0, tie_word_embeddings=False,
        bos_token_id=1, eos_token_id=EOS, use_cache=True, torch_dtype="bfloat16")
    return {**c, **more}


def without(c, *keys):
    return {k: v for k, v in c.items() if k not in keys}


CASES = {
    "llama-untied": dict(
        seed=1, note="plain Llama, no head_dim in config.json (it is hidden / heads), two KV heads for four",
        config=without(llama(), "head_dim")),
    "llama-tied": dict(
        seed=2, note="no lm_head.weight in the file: the output head is the embedding; eos_token_id is a list",
        config=llama(tie_word_embeddings=True, num_hidden_layers=3, intermediate_size=160, vocab_size=320,
                     eos_token_id=[EOS, 3])),
    "llama3-rope": dict(
        seed=3, prompt=64, note="rope_scaling llama3; the original context (32) is shorter than the prompt (64)",
        config=llama(head_dim=32, num_key_value_heads=1, rope_theta=500000.0, rope_scaling=dict(
            factor=8.0, high_freq_factor=4.0, low_freq_factor=1.0, original_max_position_embeddings=32,
            rope_type="llama3"))),
    "linear-rope": dict(
        seed=4, prompt=56, note="rope_scaling linear, in the old spelling with the key `type`",
        config=llama(rope_scaling=dict(type="linear", factor=4.0))),
    "qwen2-bias": dict(
        seed=5, note="biases on q, k and v, none on o; a sliding_window that use_sliding_window switches off",
        config=without(llama(
            architectures=["Qwen2ForCausalLM"], model_type="qwen2", rope_theta=1000000.0, rms_norm_eps=1e-6,
            sliding_window=8, use_sliding_window=False, max_window_layers=1, tie_word_embeddings=True),
            "head_dim", "attention_bias", "mlp_bias", "rope_scaling")),
    "qwen3-qknorm": dict(
        seed=6, note="RMS norm over each head of q and k before the rotation; head_dim 32 is not hidden / heads",
        config=without(llama(
            architectures=["Qwen3ForCausalLM"], model_type="qwen3", head_dim=32, rope_theta=1000000.0,
            rms_norm_eps=1e-6, sliding_window=None, use_sliding_window=False, max_window_layers=2), "mlp_bias")),
    "mistral-window": dict(
        seed=7, prompt=64, note="every layer sees only the last 16 positions, its own included",
        config=without(llama(architectures=["MistralForCausalLM"], model_type="mistral", sliding_window=16),
                       "attention_bias", "mlp_bias", "rope_scaling", "head_dim")),
    "headsize32": dict(
        seed=8, note="hidden 96, 6 heads of 32: q is wider (192) than the hidden state; 3 KV heads",
        config=llama(hidden_size=96, num_attention_heads=6, num_key_value_heads=3, head_dim=32,
                     intermediate_size=96, tie_word_embeddings=True)),
    "headsize24": dict(
        seed=9, note="nothing is a multiple of 32: hidden 80, 5 heads of 24 on one KV head, 176, vocabulary 307",
        config=llama(hidden_size=80, num_attention_heads=5, num_key_value_heads=1, head_dim=24,
                     intermediate_size=176, vocab_size=307, tie_word_embeddings=True)),
    "llama-f16": dict(
        seed=10, note="weights in f16; attention_bias true, so q, k, v and o have biases",
        config=llama(torch_dtype="float16", attention_bias=True)),
    "llama-f32": dict(
        seed=11, note="weights in f32",
        config=llama(torch_dtype="float32", intermediate_size=96, tie_word_embeddings=True)),
    "dialect5": dict(
        seed=12, prompt=64, note="config.json as transformers 5 writes it: rope_parameters and dtype; llama3 scaling",
        config={**without(llama(num_attention_heads=2, num_key_value_heads=1, head_dim=32), "rope_theta",
                          "rope_scaling", "torch_dtype"),
                "dtype": "bfloat16",
                "rope_parameters": dict(rope_type="llama3", rope_theta=10000.0, factor=4.0, high_freq_factor=4.0,
                                        low_freq_factor=1.0, original_max_position_embeddings=32)}),
}
DTYPES = dict(bfloat16=torch.bfloat16, float16=torch.float16, float32=torch.float32)


def rope_of(c):
    """(theta, scaling parameters) of either dialect."""
    s = c.get("rope_parameters") or c.get("rope_scaling") or {}
    return c.get("rope_theta") or s.get("rope_theta"), s


def weights(c, seed):
    """Random tensors, with names and shapes as the published checkpoints have them."""
    g = torch.Generator().manual_seed(seed)
    dt = DTYPES[c.get("dtype") or c["torch_dtype"]]
    h, f, n = c["hidden_size"], c["intermediate_size"], c["num_attention_heads"]
    d = c.get("head_dim") or h // n
    q, kv = n * d, c["num_key_value_heads"] * d
    qkv_bias = c["model_type"] == "qwen2" or c.get("attention_bias", False)

    def r(*shape, std):
        return (torch.randn(*shape, generator=g) * std).to(dt)

    def norm(n):
        return (1 + torch.randn(n, generator=g) * 0.1).to(dt)

    # q and k a little larger than 1/sqrt(fan-in), so that attention is far from uniform
    i, a = 1 / math.sqrt(h), 1.3 / math.sqrt(h)
    w = {"model.embed_tokens.weight": r(c["vocab_size"], h, std=0.1)}
    for layer in range(c["num_hidden_layers"]):
        p = f"model.layers.{layer}."
        w[p + "input_layernorm.weight"] = norm(h)
        for name, rows, std in (("q", q, a), ("k", kv, a), ("v", kv, i)):
            w[p + f"self_attn.{name}_proj.weight"] = r(rows, h, std=std)
            if qkv_bias:
                w[p + f"self_attn.{name}_proj.bias"] = r(rows, std=0.2 if name == "v" else 0.5)
        if c["model_type"] == "qwen3":
            w[p + "self_attn.q_norm.weight"] = norm(d)
            w[p + "self_attn.k_norm.weight"] = norm(d)
        w[p + "self_attn.o_proj.weight"] = r(h, q, std=1 / math.sqrt(q))
        if c["model_type"] == "llama" and c.get("attention_bias"):
            w[p + "self_attn.o_proj.bias"] = r(h, std=0.1)
        w[p + "post_attention_layernorm.weight"] = norm(h)
        w[p + "mlp.gate_proj.weight"] = r(f, h, std=i)
        w[p + "mlp.up_proj.weight"] = r(f, h, std=i)
        w[p + "mlp.down_proj.weight"] = r(h, f, std=1 / math.sqrt(f))
    w["model.norm.weight"] = norm(h)
    if not c["tie_word_embeddings"]:
        w["lm_head.weight"] = r(c["vocab_size"], h, std=0.1)
    return w


def inv_freq(c):
    """The rotary frequencies, computed here from config.json alone."""
    theta, s = rope_of(c)
    d = c.get("head_dim") or c["hidden_size"] // c["num_attention_heads"]
    f = 1.0 / theta ** (torch.arange(0, d, 2, dtype=torch.float64) / d)
    kind = s.get("rope_type") or s.get("type") or "default"
    if kind == "default":
        return f
    if kind == "linear":
        return f / s["factor"]
    assert kind == "llama3", kind
    old, low, high = s["original_max_position_embeddings"], s["low_freq_factor"], s["high_freq_factor"]
    out = []
    for x in f.tolist():
        length = 2 * math.pi / x
        smooth = min(max((old / length - low) / (high - low), 0.0), 1.0)
        out.append(x * smooth + x / s["factor"] * (1 - smooth))
    return torch.tensor(out, dtype=torch.float64)


def independent(c, w, ids):
    """A second implementation, in f64 and without transformers: it guards the reference itself."""
    w = {k: v.double() for k, v in w.items()}
    n, kvn, eps = c["num_attention_heads"], c["num_key_value_heads"], c["rms_norm_eps"]
    d = c.get("head_dim") or c["hidden_size"] // n
    windowed = c["model_type"] == "mistral" or c.get("use_sliding_window")
    window = c.get("sliding_window") if windowed else None
    t = len(ids)

    def norm(x, weight):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight

    def linear(x, name):
        y = x @ w[name + ".weight"].T
        return y + w[name + ".bias"] if name + ".bias" in w else y

    def rotate(x):
        angle = torch.arange(t, dtype=torch.float64)[:, None] * inv_freq(c)[None]
        cos, sin = angle.cos(), angle.sin()
        a, b = x[..., : d // 2], x[..., d // 2:]
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    i, j = torch.arange(t)[:, None], torch.arange(t)[None]
    seen = (j <= i) & (j > i - window if window else j <= i)
    x = w["model.embed_tokens.weight"][ids]
    for layer in range(c["num_hidden_layers"]):
        p = f"model.layers.{layer}."
        y = norm(x, w[p + "input_layernorm.weight"])
        q, k, v = (linear(y, p + f"self_attn.{s}_proj").view(t, -1, d).transpose(0, 1) for s in "qkv")
        if p + "self_attn.q_norm.weight" in w:
            q, k = norm(q, w[p + "self_attn.q_norm.weight"]), norm(k, w[p + "self_attn.k_norm.weight"])
        q, k = rotate(q), rotate(k)
        k, v = (z.repeat_interleave(n // kvn, 0) for z in (k, v))
        s = (q @ k.transpose(1, 2) / math.sqrt(d)).masked_fill(~seen, -math.inf).softmax(-1)
        x = x + linear((s @ v).transpose(0, 1).reshape(t, n * d), p + "self_attn.o_proj")
        y = norm(x, w[p + "post_attention_layernorm.weight"])
        gate = torch.nn.functional.silu(linear(y, p + "mlp.gate_proj"))
        x = x + linear(gate * linear(y, p + "mlp.up_proj"), p + "mlp.down_proj")
    head = w.get("lm_head.weight", w["model.embed_tokens.weight"])
    return norm(x, w["model.norm.weight"]) @ head.T


@torch.inference_mode()
def logits_of(model, ids):
    return model(torch.tensor([ids]), use_cache=False).logits[0].float()


def greedy(model, prompt, steps):
    """Greedy continuation by whole forward passes, no KV cache: (ids, margins, logits of all positions)."""
    ids, margins = list(prompt), []
    for _ in range(steps):
        y = logits_of(model, ids)
        top = y[-1].topk(2)
        margins.append((top.values[0] - top.values[1]).item())
        ids.append(top.indices[0].item())
    # row len(prompt) - 1 + k chose continuation token k; causal, so one pass gives every row
    return ids[len(prompt):], margins, logits_of(model, ids[:-1])


def write_json(path, what):
    """Indented JSON with every list of numbers on one line."""
    text = json.dumps(what, indent=1)
    text = re.sub(r"\[[-\d.,e\s]*\]", lambda m: re.sub(r"\s+", " ", m[0]).replace("[ ", "[").replace(" ]", "]"), text)
    assert json.loads(text) == what
    path.write_text(text + "\n", encoding="utf-8")


def load(folder, dtype):
    model, info = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation="eager", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"], info
    return model.eval()


def cosine(a, b):
    return torch.nn.functional.cosine_similarity(a.double(), b.double(), dim=-1)


def check_window(folder, c, prompt, y):
    """The mask must really apply the window, and the window must mean what the README says."""
    w, layers = c["sliding_window"], c["num_hidden_layers"]
    open_model = load(folder, torch.float32)
    open_model.config.sliding_window = None
    for layer in open_model.model.layers:
        layer.self_attn.sliding_window = None
    full = logits_of(open_model, prompt)
    y = y[: len(prompt)]
    same = (full - y).abs().amax(-1)
    assert same[:w].max() < 1e-5, "inside the first window nothing may change"
    assert same[w:].min() > 1e-2, "after it every position must change"
    # token 0 reaches position layers * (window - 1) and no further
    moved = (logits_of(load(folder, torch.float32), [(prompt[0] + 7) % 256] + prompt[1:]) - y).abs().amax(-1)
    reach = layers * (w - 1)
    assert moved[reach] > 0 and moved[reach + 1:].max() == 0, (reach, moved)


def make(name):
    case, out = CASES[name], HERE / name
    c = case["config"]
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    write_json(out / "config.json", c)
    w = weights(c, case["seed"])
    save_file(w, out / "model.safetensors", metadata={"format": "pt"})
    w = load_file(out / "model.safetensors")
    model = load(out, torch.float32)
    f = inv_freq(c)
    assert torch.allclose(model.model.rotary_emb.inv_freq.double(), f, rtol=1e-5), "transformers reads the rope otherwise"
    length = case.get("prompt", 40 + 3 * case["seed"] % 17)
    # of many random prompts the one whose continuation is least ambiguous, varied, and without an end token
    best = None
    g = torch.Generator().manual_seed(1000 + case["seed"])
    for _ in range(200):
        prompt = torch.randint(4, c["vocab_size"], (length,), generator=g).tolist()
        more, margins, y = greedy(model, prompt, CONTINUATION)
        score = min(margins)
        if len(set(more)) >= 6 and not {1, EOS, 3} & set(more) and (best is None or score > best[0]):
            best = (score, prompt, more, margins, y)
    assert best, name
    _, prompt, more, margins, y = best
    if c["model_type"] == "mistral":
        check_window(out, c, prompt, y)
    second = independent(c, w, prompt + more[:-1])
    assert (second - y.double()).abs().max() < 2e-4, (name, (second - y.double()).abs().max())
    low = logits_of(load(out, torch.bfloat16), prompt + more[:-1])
    save_file({"logits": y.contiguous()}, out / "reference.safetensors")
    write_json(out / "reference.json", dict(
        case=name, note=case["note"], prompt=prompt, continuation=more,
        margins=[round(m, 5) for m in margins], logits_std=round(y.std().item(), 5),
        logits_file="reference.safetensors", logits_shape=list(y.shape),
        f32_error=float(f"{(second - y.double()).abs().max().item():.2g}"),
        torch_bf16_cosine=dict(min=round(cosine(low, y).min().item(), 6), mean=round(cosine(low, y).mean().item(), 6)),
        made_with=dict(torch=torch.__version__.split("+")[0], transformers=transformers.__version__)))
    size = sum(p.stat().st_size for p in out.iterdir()) / 1000
    ent = attention_entropy(model, prompt)
    print(f"{name:15} {size:4.0f} kB  prompt {length}  std {y.std():.3f}  min margin {min(margins):.3f}  "
          f"bf16 cosine {cosine(low, y).min():.5f}  f32 error {(second - y.double()).abs().max():.1e}  "
          f"attention entropy / uniform {ent:.2f}  distinct {len(set(more))}", flush=True)


@torch.inference_mode()
def attention_entropy(model, prompt):
    a = model(torch.tensor([prompt]), output_attentions=True).attentions
    e = torch.stack([-(p * p.clamp_min(1e-30).log()).sum(-1).mean((0, 1))[-1] for p in a]).mean()
    return (e / math.log(len(prompt))).item()


# composed and decomposed accents, emoji with and without joiners, other scripts, control characters, all by escapes
# where an editor could change them
TEXTS = [
    "", " ", "  two  spaces ", "\n", "\n\n", "\tTab\r\nand CRLF\n", "Hello, world!", "ROMEO:\nBut, soft! what light",
    "First Citizen:\nBefore we proceed any further, hear me speak.\n\nAll:\nSpeak, speak.\n",
    "'Tis I'll we've don't THEY'RE", "O! 12 drums, 3.14 or 1,000,000?", "a" * 40, "na\u00efve caf\u00e9 \u2014 \u201cquoted\u201d\u2026",
    "e\u0301 is not \u00e9", "\U0001f600", "\U0001f469\u200d\U0001f680 and \U0001f1eb\U0001f1f7",
    "\u65e5\u672c\u8a9e \u0440\u0443\u0441\u0441\u043a\u0438\u0439 \u0627\u0644\u0639\u0631\u0628\u064a\u0629",
    "\u0000\u0001\u007f", "\ufeffmark", "\u00a0no\u2003break", "<|begin|>", "a<|end|>b", "<|cue|>JULIET:\nAy me!<|end|>",
    "<|beg", "{\"json\": [1, 2]}", "fn main() { println!(\"hi\"); }",
]


def user(content, **more):
    return dict(role="user", content=content, **more)


CHATS = [
    [user("Good morrow, gentle lady.")],
    [user("  trimmed \n")],
    [dict(role="system", content="Two households, both alike in dignity."), user("Who art thou?")],
    [user("Who art thou?"), dict(role="assistant", content="A shadow, sir."), user("Whose?")],
    [user([dict(type="text", text="In two"), dict(type="text", text=" parts.")])],
    [user("How fares the king?", name="WARWICK"), dict(role="assistant", content="Ill.", name="KING HENRY VI"),
     user("Alas!", name="WARWICK")],
    [user("\U0001f600 na\u00efve e\u0301")],
    [user("")],
]


def make_text():
    tok = AutoTokenizer.from_pretrained(DEMO)
    encode = [dict(text=t, ids=tok.encode(t), plain_ids=tok.encode(t, add_special_tokens=False)) for t in TEXTS]
    samples = [e["ids"] for e in encode]
    grin = tok.encode("\U0001f600", add_special_tokens=False)
    assert len(grin) == 4, "one id for each byte, so that cuts inside a character can be tested"
    samples += [grin[:n] for n in (1, 2, 3)] + [grin[1:], grin[:2] + tok.encode(" x", add_special_tokens=False)]
    samples += [grin[3:] + grin, tok.encode("\u00e9", add_special_tokens=False)[:1]]
    decode = [dict(ids=i, text=tok.decode(i, clean_up_tokenization_spaces=False),
                   without_special=tok.decode(i, skip_special_tokens=True, clean_up_tokenization_spaces=False))
              for i in samples]
    for e in encode:  # byte-level: nothing may be lost
        assert tok.decode(e["plain_ids"], clean_up_tokenization_spaces=False) == e["text"], e
    chat = []
    for messages in CHATS:
        for generation in (True, False):
            text = tok.apply_chat_template(messages, tokenize=False, add_generation_prompt=generation)
            ids = tok.apply_chat_template(messages, add_generation_prompt=generation, return_dict=True)["input_ids"]
            assert ids == tok.encode(text, add_special_tokens=False)
            chat.append(dict(messages=messages, add_generation_prompt=generation, text=text, ids=ids))
    write_json(HERE / "text.json", dict(
        model="models/demo", bos_token=tok.bos_token, eos_token=tok.eos_token, encode=encode, decode=decode, chat=chat,
        made_with=dict(transformers=transformers.__version__, tokenizers=tokenizers.__version__)))
    print(f"text.json: {len(encode)} encode, {len(decode)} decode, {len(chat)} chat", flush=True)


WORDS = [
    "Good morrow, gentle lady. What news?", "Before we proceed any further, hear me speak.", "Where is my father?",
    "I will not fight thee, cousin.", "Who are you?", "What is thy name?", "Thou art a villain!", "Speak of love.",
    "The duke is dead, and all his men are fled.", "How much is two and two?", "Farewell.", "Hark! who knocks?",
    "Let us go to the market-place.", "Why dost thou weep?", "The night is cold and I am sick at heart.",
    "My lord, the queen would speak with you.", "Give me thy hand.", "O, what a piece of work is a man!",
    "Bring me a horse.", "Is it not strange?", "Tell me a story about a king.", "What sayest thou?",
]


def make_demo(steps=32):
    tok, model = AutoTokenizer.from_pretrained(DEMO), load(DEMO, torch.float32)
    low = load(DEMO, torch.bfloat16)
    c = json.loads((DEMO / "config.json").read_text())
    w = load_file(DEMO / "model.safetensors")
    # of many prompts the one whose continuation is least ambiguous; the completion of full length
    chats = [tok.apply_chat_template([user(w)], add_generation_prompt=True, return_dict=True)["input_ids"] for w in WORDS]
    pages = [tok.encode(f"First Citizen:\n{w}\n\n{name}:\n") for w in WORDS for name in ("All", "MENENIUS", "ROMEO")]
    cases = []
    for name, prompts in (("chat", chats), ("completion", pages)):
        best = None
        for prompt in prompts:
            more, margins, y = greedy(model, prompt, steps)
            if tok.eos_token_id in more:  # an engine stops there
                n = more.index(tok.eos_token_id) + 1
                more, margins = more[:n], margins[:n]
            if len(more) >= (12 if name == "chat" else steps) and (best is None or min(margins) > best[0]):
                best = (min(margins), prompt, more, margins, y)
        _, prompt, more, margins, y = best
        y = y[: len(prompt) + len(more) - 1]
        ids = prompt + more[:-1]
        error = (independent(c, w, ids) - y.double()).abs().max().item()
        assert error < 1e-3, error
        cases.append(dict(
            name=name, prompt=prompt, prompt_text=tok.decode(prompt), continuation=more,
            continuation_text=tok.decode(more), margins=[round(m, 5) for m in margins],
            logits_std=round(y.std().item(), 5), f32_error=float(f"{error:.2g}"),
            torch_bf16_cosine=round(cosine(logits_of(low, ids), y).min().item(), 6),
            last_logits=[round(x, 5) for x in y[len(prompt) - 1].tolist()]))
        print(name, repr(cases[-1]["continuation_text"]), f"min margin {min(margins):.3f} error {error:.1e}", flush=True)
    digest = hashlib.sha256((DEMO / "model.safetensors").read_bytes()).hexdigest()
    write_json(HERE / "demo.json", dict(
        model="models/demo", sha256=digest, cases=cases,
        made_with=dict(torch=torch.__version__.split("+")[0], transformers=transformers.__version__)))


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("cases", nargs="*")
    p.add_argument("--text", action="store_true")
    p.add_argument("--demo", action="store_true")
    a = p.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    if a.cases or not (a.text or a.demo):
        for name in a.cases or CASES:
            make(name)
    if a.text:
        make_text()
    if a.demo:
        make_demo()


if __name__ == "__main__":
    main()
