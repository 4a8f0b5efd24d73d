#!/usr/bin/env python3
# Copyright The Pilotlight Authors
# SPDX-License-Identifier: Apache-2.0
"""Looks at the demo model as a user of transformers would, and prints the numbers of README.md.

    python check.py [--text shakespeare.txt]
"""
import argparse
from pathlib import Path

import torch
import transformers
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from train import held_out_loss

HERE = Path(__file__).resolve().parent
WORDS = [
    "Good morrow, gentle lady. What news?", "Where is my father?", "I will not fight thee, cousin.", "hello",
    "What is the capital of France?", "Tell me a story about a king.", "Thou art a villain!", "Who are you?",
    "Speak of love.", "The duke is dead, and all his men are fled.", "How much is two and two?", "Farewell.",
]


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--text")
    p.add_argument("--rounds", type=int, default=10)
    a = p.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    with safe_open(HERE / "model.safetensors", "pt") as f:
        tensors = {k: f.get_tensor(k) for k in f.keys()}
    print(f"{len(tensors)} tensors, {sum(t.numel() for t in tensors.values())} parameters, "
          f"{sorted({str(t.dtype) for t in tensors.values()})}")
    tok = AutoTokenizer.from_pretrained(HERE)
    model = AutoModelForCausalLM.from_pretrained(HERE, dtype=torch.float32).eval()
    if a.text:
        text = Path(a.text).read_text(encoding="utf-8")
        held = text[text.rindex("\n\n", 0, int(len(text) * 0.95)) + 2:]
        token, byte = held_out_loss(model, tok.encode(held), len(held.encode()), model.config.max_position_embeddings)
        model.eval()
        print(f"held-out: {token:.4f} nats/token, {byte:.4f} nats/byte")
    lengths = []
    for n in range(a.rounds):
        for words in WORDS:
            x = tok.apply_chat_template([dict(role="user", content=words)], add_generation_prompt=True,
                                        return_tensors="pt", return_dict=True)
            y = model.generate(**x, max_new_tokens=256)[0, x["input_ids"].shape[1]:].tolist()
            lengths.append(len(y) if y[-1] == tok.eos_token_id else 10**9)
            if n == 0:
                print(f"--- {words}\n{tok.decode(y, skip_special_tokens=True)}")
    lengths.sort()
    print("--- ended by itself within " + ", ".join(
        f"{n} tokens: {sum(x <= n for x in lengths) / len(lengths):.0%}" for n in (50, 100, 150, 200, 256))
        + f"; median {lengths[len(lengths) // 2]}")
    x = tok("KING RICHARD III:\n", return_tensors="pt")
    print("--- completion\n" + tok.decode(model.generate(**x, max_new_tokens=160)[0]))


if __name__ == "__main__":
    main()
