#!/usr/bin/env python3
"""Writes tests/golden/data/greedy.json: what transformers' generate adds to prompts, greedily, in fp32.

    TESSERA_TEST_DATA=build/release/tests/golden/data .venv/bin/python tests/golden/make_greedy.py

Prompts are beginnings of the folders' own input_ids. `margin` is the smallest distance between the
most likely and the next token at any step: as long as it is far above the noise of fp32 logits
(5e-5 in these folders), every correct implementation chooses the same tokens. Written with
transformers 5.23.0 and torch 2.13.0.
"""

import json
import os
import pathlib

import torch
import transformers
from safetensors.torch import load_file

DATA = pathlib.Path(os.environ["TESSERA_TEST_DATA"])
NEW_TOKENS = 32
PROMPTS = {"qwen3-fp32": [1, 6, 20], "qwen3-mixed": [6], "llama-fp32": [1, 6, 20],
           "llama-mixed": [6], "qwen3-next-fp32": [1, 62, 7, 70],
           "nemotron-h-fp32": [2, 1, 63, 72], "qwen3-5-text-fp32": [7, 62, 65, 72]}


def main():
    texts = []
    for folder, lengths in PROMPTS.items():
        model = transformers.AutoModelForCausalLM.from_pretrained(DATA / folder,
                                                                  dtype=torch.float32).eval()
        ids = load_file(DATA / folder / "reference.safetensors")["input_ids"]
        for row, length in enumerate(lengths):
            prompt = ids[row % len(ids), :length].unsqueeze(0)
            out = model.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False,
                                 max_new_tokens=NEW_TOKENS, return_dict_in_generate=True,
                                 output_logits=True)
            best = torch.cat(out.logits).topk(2).values
            texts.append({"folder": folder, "prompt": prompt[0].tolist(),
                          "tokens": out.sequences[0, length:].tolist(),
                          "eos": model.generation_config.eos_token_id,
                          "margin": round((best[:, 0] - best[:, 1]).min().item(), 6)})
            print(texts[-1])
    (pathlib.Path(__file__).parent / "data/greedy.json").write_text(
        "[\n" + ",\n".join(json.dumps(text) for text in texts) + "\n]\n")


if __name__ == "__main__":
    main()
