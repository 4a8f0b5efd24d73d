#!/usr/bin/env python3
# Copyright The Pilotlight Authors
# SPDX-License-Identifier: Apache-2.0
"""Trains Pilotlight's demo model: a small Llama that writes Shakespearean dialogue.

    pip install -r requirements.txt
    python train.py --text shakespeare.txt --out .

One thread, one seed: the same versions on the same kind of processor give the same weights for the same number
of steps. A run too slow for its time limit (--minutes) takes fewer steps, and says how many. Writes a Hugging Face folder: config.json,
model.safetensors (bf16), tokenizer.json, tokenizer_config.json, generation_config.json, and train.json with
what was measured.
"""
import argparse, copy, json, math, random, re, time
from pathlib import Path

import torch
import transformers
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

BEGIN, END, CUE = "<|begin|>", "<|end|>", "<|cue|>"
PACE = 100  # steps of warming up, after which the learning rate falls and the pace is known

# A conversation is a scene. Each message becomes a speech: the user is ROMEO, the model is JULIET, a system
# message is spoken by the Chorus, and `name` in a message replaces the speaker. Every speech ends with END.
CHAT_TEMPLATE = """\
{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {%- set speaker = 'ROMEO' %}
    {%- elif message.role == 'assistant' %}
        {%- set speaker = 'JULIET' %}
    {%- else %}
        {%- set speaker = 'Chorus' %}
    {%- endif %}
    {%- if message.name is defined and message.name %}
        {%- set speaker = message.name %}
    {%- endif %}
    {{- '<|cue|>' + speaker + ':\\n' }}
    {%- if message.content is string %}
        {{- message.content | trim }}
    {%- elif message.content %}
        {%- for part in message.content %}
            {%- if part.type == 'text' %}
                {{- part.text }}
            {%- endif %}
        {%- endfor %}
    {%- endif %}
    {{- eos_token }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|cue|>JULIET:\\n' }}
{%- endif %}
"""


def arguments():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--text", required=True, help="the text: speeches `NAME:` + lines, separated by an empty line")
    p.add_argument("--out", default=".", help="folder for the model")
    p.add_argument("--steps", type=int, default=4500)
    p.add_argument("--minutes", type=float, default=40, help="limit on the processor time of the training loop")
    p.add_argument("--wall-minutes", type=float, default=1e9, help="limit on its time by the clock")
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--threads", type=int, default=1)
    p.add_argument("--vocab", type=int, default=1024)
    p.add_argument("--hidden", type=int, default=192)
    p.add_argument("--layers", type=int, default=6)
    p.add_argument("--heads", type=int, default=6)
    p.add_argument("--intermediate", type=int, default=512)
    p.add_argument("--context", type=int, default=512)
    p.add_argument("--tokens-per-step", type=int, default=2048)
    p.add_argument("--lr", type=float, default=1.5e-3)
    p.add_argument("--weight-decay", type=float, default=0.1)
    p.add_argument("--dropout", type=float, default=0.2)
    p.add_argument("--scatter", type=float, default=0.2, help="largest BPE dropout in training")
    p.add_argument("--average", type=float, default=0.995, help="decay of the running average of the weights")
    p.add_argument("--evaluate-every", type=int, default=300)
    p.add_argument("--f32", action="store_true", help="no bf16 autocast (slower on processors that multiply bf16)")
    return p.parse_args()


def train_tokenizer(text, vocab, context, out):
    t = Tokenizer(models.BPE())
    t.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    t.decoder = decoders.ByteLevel()
    t.train_from_iterator(text.split("\n\n"), trainers.BpeTrainer(
        vocab_size=vocab, special_tokens=[BEGIN, END, CUE], show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet())))
    assert t.get_vocab_size() == vocab
    begin = t.token_to_id(BEGIN)
    t.post_processor = processors.Sequence([
        processors.ByteLevel(trim_offsets=False),
        processors.TemplateProcessing(single=f"{BEGIN} $A", pair=f"{BEGIN} $A {BEGIN}:1 $B:1",
                                      special_tokens=[(BEGIN, begin)])])
    t.save(str(out / "tokenizer.json"))
    json.dump(dict(
        tokenizer_class="PreTrainedTokenizerFast", bos_token=BEGIN, eos_token=END, pad_token=END,
        additional_special_tokens=[CUE], clean_up_tokenization_spaces=False, model_max_length=context,
        chat_template=CHAT_TEMPLATE), open(out / "tokenizer_config.json", "w"), indent=2)
    return t


def ids(t, text):
    return t.encode(text, add_special_tokens=False).ids


class Scatter:
    """BPE dropout from a seeded source (the one of `tokenizers` cannot be seeded)."""

    def __init__(self, t, rng):
        self.t, self.rng, model = t, rng, json.loads(t.to_str())["model"]
        self.vocab = model["vocab"]
        self.ranks = {tuple(m) if isinstance(m, list) else tuple(m.split(" ")): i for i, m in enumerate(model["merges"])}

    def ids(self, text, p):
        if p == 0:
            return ids(self.t, text)
        out, random01 = [], self.rng.random
        for word, _ in self.t.pre_tokenizer.pre_tokenize_str(text):
            parts = list(word)
            while len(parts) > 1:
                found = [(r, i) for i, pair in enumerate(zip(parts, parts[1:]))
                         if (r := self.ranks.get(pair)) is not None and random01() >= p]
                if not found:
                    break
                i = min(found)[1]
                parts[i:i + 2] = [parts[i] + parts[i + 1]]
            out += [self.vocab[x] for x in parts]
        return out


def shortened(words, limit=380):
    """A speech for the chat form: whole sentences up to about `limit` characters."""
    if len(words) <= limit:
        return words
    ends = [m.end() for m in re.finditer(r"[.?!](?=\s)", words) if m.end() <= limit]
    return words[:ends[-1]] if ends else None


def epoch(t, scatter, speeches, names, rng, most):
    """All speeches once, cut into documents of two forms, shuffled, as one stream of ids.

    Page form:  <|begin|>NAME:\\nspeech\\n\\nNAME:\\nspeech ... <|end|>      (about 12 speeches; plain completion)
    Chat form:  <|begin|><|cue|>NAME:\\nspeech<|end|><|cue|>NAME:\\n...<|end|>  (2 to 6 short speeches)

    The text is small, so it is varied against learning by heart: most documents are encoded with some merges left
    out at random (BPE dropout, up to `most`), and in some of the chat form the speakers get other names.
    """
    begin, end, cue = (t.token_to_id(x) for x in (BEGIN, END, CUE))
    documents, i = [], 0
    while i < len(speeches):
        p = most * rng.random() if rng.random() < 0.75 else 0.0
        if rng.random() < 0.5:
            n = rng.randint(6, 18)
            documents.append([begin] + scatter.ids("\n\n".join(speeches[i:i + n]), p) + [end])
        else:
            n = rng.choice([2, 2, 3, 4, 5, 6])
            others = {} if rng.random() < 0.35 else None
            document = [begin]
            for s in speeches[i:i + n]:
                name, _, words = s.partition("\n")
                if others is not None:
                    name = others.setdefault(name, rng.choice(names))
                words = shortened(words)
                if words:
                    document += [cue] + scatter.ids(name + "\n" + words, p) + [end]
            documents.append(document)
        i += n
    rng.shuffle(documents)
    return [x for d in documents for x in d]


class Batches:
    """Windows of `width` + 1 ids from an endless stream of epochs."""

    def __init__(self, t, speeches, seed, most):
        self.t, self.speeches, self.rng, self.most = t, speeches, random.Random(seed), most
        self.scatter = Scatter(t, self.rng)
        self.names = sorted({s.partition("\n")[0] for s in speeches}) + ["ROMEO:", "JULIET:", "Chorus:"] * 40
        self.stream, self.at, self.epochs = [], 0, 0

    def next(self, rows, width, done):
        out = []
        for _ in range(rows):
            if self.at + width + 1 > len(self.stream):
                # another offset each time, so that documents begin elsewhere; towards the end plainer encodings
                k = self.rng.randrange(12)
                self.stream = epoch(self.t, self.scatter, self.speeches[k:] + self.speeches[:k], self.names, self.rng,
                                    self.most * min(1.0, 1.5 * (1.05 - done)))
                self.at, self.epochs = 0, self.epochs + 1
            out.append(self.stream[self.at:self.at + width + 1])
            self.at += width
        x = torch.tensor(out)
        return x[:, :-1], x[:, 1:]


@torch.inference_mode()
def held_out_loss(model, tokens, n_bytes, context):
    """(nats per token, nats per byte) of the held-out pages as one text, each id seen with at least half a
    context before it (except at the start)."""
    model.eval()
    total, count, half, at = 0.0, 0, context // 2, 0
    while at + 1 < len(tokens):
        x = torch.tensor(tokens[at:at + context + 1])[None]
        skip = 0 if at == 0 else half
        y = model(input_ids=x[:, :-1], use_cache=False).logits[0, skip:].float()
        target = x[0, 1:][skip:]
        if len(target):
            total += torch.nn.functional.cross_entropy(y, target, reduction="sum").item()
            count += len(target)
        if at + context + 1 >= len(tokens):
            break
        at += half
    assert count == len(tokens) - 1
    model.train()
    return total / count, total / n_bytes


def main():
    a = arguments()
    torch.manual_seed(a.seed)
    torch.set_num_threads(a.threads)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    out = Path(a.out)
    out.mkdir(parents=True, exist_ok=True)
    text = Path(a.text).read_text(encoding="utf-8")
    cut = text.rindex("\n\n", 0, int(len(text) * 0.95))
    train, held = text[:cut], text[cut + 2:]
    t = train_tokenizer(train, a.vocab, a.context, out)
    # speeches that lack a name belong to the one before
    speeches = []
    for s in train.strip().split("\n\n"):
        if re.match(r"[A-Z][^\n]{0,40}:\n\S", s):
            speeches.append(s)
    held_ids = [t.token_to_id(BEGIN)] + ids(t, held)
    n_bytes = len(held.encode())
    print(f"{len(train)} + {len(held)} characters, {len(speeches)} speeches, held-out bytes per token "
          f"{n_bytes / (len(held_ids) - 1):.3f}", flush=True)

    config = LlamaConfig(
        vocab_size=a.vocab, hidden_size=a.hidden, intermediate_size=a.intermediate, num_hidden_layers=a.layers,
        num_attention_heads=a.heads, num_key_value_heads=a.heads // 2, head_dim=a.hidden // a.heads,
        max_position_embeddings=a.context, rms_norm_eps=1e-5, tie_word_embeddings=True,
        bos_token_id=t.token_to_id(BEGIN), eos_token_id=t.token_to_id(END), pad_token_id=t.token_to_id(END),
        rope_parameters=dict(rope_type="default", rope_theta=10000.0))
    model = LlamaForCausalLM(config)
    n = sum(p.numel() for p in model.parameters())
    print(f"{n} parameters", flush=True)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                p.mul_(1 / math.sqrt(2 * a.layers))
    drop = torch.nn.Dropout(a.dropout)
    hooks = [m.register_forward_hook(lambda m, i, o: drop(o)) for name, m in model.named_modules()
             if name.endswith(("o_proj", "down_proj", "embed_tokens"))]
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    optimizer = torch.optim.AdamW([dict(params=matrices, weight_decay=a.weight_decay),
                                   dict(params=vectors, weight_decay=0.0)], lr=a.lr, betas=(0.9, 0.98), fused=True)
    average = copy.deepcopy(model)
    for m in average.modules():
        m._forward_hooks.clear()
    batches = Batches(t, speeches, a.seed, a.scatter)
    clock, wall, history, best, step, done = time.process_time(), time.time(), [], None, 0, 0.0
    model.train()
    while True:
        spent = (time.process_time() - clock) / 60
        passed = (time.time() - wall) / 60
        # once the pace is known, fewer steps if they would not fit (never by the clock alone, so that a run can be repeated)
        if step == PACE:
            share = max(spent / a.minutes, passed / a.wall_minutes) * 1.02 / PACE
            if share * a.steps > 1:
                a.steps = max(int(1 / share), PACE + 1)
                print(f"too slow for the time limit: {a.steps} steps", flush=True)
        done = min(max((step - PACE) / max(a.steps - PACE, 1), 0.0), 1.0)
        last = step >= a.steps or spent >= a.minutes or passed >= a.wall_minutes
        if last or (step and step % a.evaluate_every == 0):
            token, byte = held_out_loss(average, held_ids, n_bytes, a.context)
            history.append(dict(step=step, nats_per_token=round(token, 4), nats_per_byte=round(byte, 4)))
            print(f"step {step:5} epoch {batches.epochs:3} cpu {spent:5.1f} min wall {passed:5.1f} min  "
                  f"train {loss.item():.3f}  held-out {token:.4f} nats/token {byte:.4f} nats/byte", flush=True)
            if best is None or token < best[0]:
                best = (token, step, copy.deepcopy(average.state_dict()))
            elif token > best[0] * 1.02:
                print("held-out loss rises: stop", flush=True)
                last = True
        if last:
            break
        warm = min(1.0, (step + 1) / PACE)
        for g in optimizer.param_groups:
            g["lr"] = a.lr * warm * (0.03 + 0.97 * 0.5 * (1 + math.cos(math.pi * done)))
        # shorter windows cost less; the whole context must be seen from the beginning, and only that at the end
        width = a.context if step % 3 == 0 or done > 0.7 else a.context // 2
        x, y = batches.next(a.tokens_per_step // width, width, done)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=not a.f32):
            logits = model(input_ids=x, use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), y.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step += 1
        with torch.no_grad():
            decay = min(a.average, step / (step + 10))
            for p, q in zip(average.parameters(), model.parameters()):
                p.lerp_(q, 1 - decay)
    spent, passed = (time.process_time() - clock) / 60, (time.time() - wall) / 60

    average.load_state_dict(best[2])
    rounded = {k: v.to(torch.bfloat16).contiguous() for k, v in average.state_dict().items() if k != "lm_head.weight"}
    save_file(rounded, out / "model.safetensors", metadata={"format": "pt"})
    json.dump(dict(
        architectures=["LlamaForCausalLM"], model_type="llama", vocab_size=a.vocab, hidden_size=a.hidden,
        intermediate_size=a.intermediate, num_hidden_layers=a.layers, num_attention_heads=a.heads,
        num_key_value_heads=a.heads // 2, head_dim=a.hidden // a.heads, hidden_act="silu",
        max_position_embeddings=a.context, rms_norm_eps=1e-5, rope_theta=10000.0, rope_scaling=None,
        attention_bias=False, attention_dropout=0.0, mlp_bias=False, tie_word_embeddings=True,
        bos_token_id=t.token_to_id(BEGIN), eos_token_id=t.token_to_id(END), pad_token_id=t.token_to_id(END),
        initializer_range=0.02, pretraining_tp=1, use_cache=True, torch_dtype="bfloat16"),
        open(out / "config.json", "w"), indent=2)
    json.dump(dict(
        bos_token_id=t.token_to_id(BEGIN), eos_token_id=t.token_to_id(END), pad_token_id=t.token_to_id(END),
        do_sample=True, temperature=0.8, top_p=0.95), open(out / "generation_config.json", "w"), indent=2)

    # what was written, read back as anybody would, in f32 arithmetic on the bf16 weights
    written = LlamaForCausalLM.from_pretrained(out, dtype=torch.float32)
    token, byte = held_out_loss(written, held_ids, n_bytes, a.context)
    json.dump(dict(
        parameters=n, steps=step, kept_step=best[1], epochs=batches.epochs, seed=a.seed,
        processor_minutes=round(spent, 1), wall_minutes=round(passed, 1), threads=a.threads,
        held_out=dict(bytes=n_bytes, tokens=len(held_ids) - 1, f32_nats_per_token=round(best[0], 4),
                      bf16_nats_per_token=round(token, 4), bf16_nats_per_byte=round(byte, 4)),
        history=history,
        settings={k: v for k, v in vars(a).items() if k not in ("text", "out")},
        made_with=dict(torch=torch.__version__.split("+")[0], transformers=transformers.__version__)),
        open(out / "train.json", "w"), indent=1)
    print(f"kept step {best[1]}; after rounding to bf16: {token:.4f} nats/token, {byte:.4f} nats/byte", flush=True)

    tok = AutoTokenizer.from_pretrained(out)
    torch.manual_seed(a.seed)
    written.eval()
    for words in ("Good morrow, gentle lady. What news?", "Shall I hear more, or shall I speak at this?"):
        x = tok.apply_chat_template([dict(role="user", content=words)], add_generation_prompt=True,
                                    return_tensors="pt", return_dict=True)
        y = written.generate(**x, max_new_tokens=200)
        print("---\n" + tok.decode(y[0]), flush=True)


if __name__ == "__main__":
    main()
