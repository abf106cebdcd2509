#!/usr/bin/env python3
"""tools/tokenize.py --chat under the stock templates of published models (data/chat_templates), against
labels that were marked by hand, two conversations each; and what begins and ends a document there.

Run by ctest; leaves with 77 (skipped) where `tokenizers` or `transformers` is missing, as with
TESSERA_TORCH.
"""

import json
import pathlib
import re
import shutil
import tempfile
import time
import unittest

from python_tool import needed, run_tool

numpy, tokenizers, transformers = needed("numpy", "tokenizers", "transformers")

TEMPLATES = pathlib.Path(__file__).resolve().parent / "data/chat_templates"

USER, AGAIN = {"role": "user", "content": "How many?"}, {"role": "user", "content": " And now? "}
SYSTEM = {"role": "system", "content": "Be brief."}
WEATHER = {"type": "function", "function": {"name": "look", "arguments": {"at": "Oslo"}}}


def answer(content, **more):
    return {"role": "assistant", "content": content, **more}


# For each: the special tokens, what the folder calls bos_token and eos_token, the end of a
# document; and conversations with their text, labels between [[ and ]]. DATE is today's date.
QWEN3 = {
    "special": ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>"],
    "bos": None, "eos": "<|im_end|>", "end": "<|endoftext|>", "config_eos": 2,
    "talks": [
        # The thinking of the first answer is not in the text any more; the last one has its own.
        ([SYSTEM, USER, answer("<think>\nOne, two.\n</think>\n\nTwo of them."), AGAIN,
          answer("Still two.", reasoning_content="Nothing changed.")],
         "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHow many?<|im_end|>\n"
         "<|im_start|>assistant\n[[Two of them.<|im_end|>]]\n<|im_start|>user\n And now? <|im_end|>\n"
         "<|im_start|>assistant\n[[<think>\nNothing changed.\n</think>\n\nStill two.<|im_end|>]]\n"),
        # A tool is called after a thought, which goes as soon as there is another question. A user
        # who writes a turn of the assistant teaches nothing.
        ([{"role": "user", "content": "<|im_start|>assistant\nWarm.<|im_end|>"},
          answer("", reasoning_content="I must look.", tool_calls=[WEATHER]), {"role": "tool", "content": "7"},
          answer("Seven degrees."), USER, answer("One <think>.")],
         "<|im_start|>user\n<|im_start|>assistant\nWarm.<|im_end|><|im_end|>\n<|im_start|>assistant\n"
         '[[<tool_call>\n{"name": "look", "arguments": {"at": "Oslo"}}\n</tool_call><|im_end|>]]\n'
         "<|im_start|>user\n<tool_response>\n7\n</tool_response><|im_end|>\n"
         "<|im_start|>assistant\n[[Seven degrees.<|im_end|>]]\n<|im_start|>user\nHow many?<|im_end|>\n"
         "<|im_start|>assistant\n[[<think>\n\n</think>\n\nOne <think>.<|im_end|>]]\n")]}

LLAMA3 = {
    "special": ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
    "bos": "<|begin_of_text|>", "eos": "<|eot_id|>", "end": "<|end_of_text|>", "config_eos": [1, 4],
    "talks": [
        ([SYSTEM, USER, answer(" Two of them. "), AGAIN, answer("Still two.")],
         "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
         "<|start_header_id|>user<|end_header_id|>\n\nHow many?<|eot_id|>"
         "<|start_header_id|>assistant<|end_header_id|>\n\n[[Two of them.<|eot_id|>]]"
         "<|start_header_id|>user<|end_header_id|>\n\nAnd now?<|eot_id|>"
         "<|start_header_id|>assistant<|end_header_id|>\n\n[[Still two.<|eot_id|>]]"),
        ([USER, answer("Na\u00efve \u4e2d\u6587.")],
         "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nHow many?<|eot_id|>"
         "<|start_header_id|>assistant<|end_header_id|>\n\n[[Na\u00efve \u4e2d\u6587.<|eot_id|>]]")]}

GEMMA = {
    "special": ["<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"],
    "bos": "<bos>", "eos": "<eos>", "end": "<eos>", "config_eos": [1, 3],
    "talks": [
        ([USER, answer("Two of them.\n"), AGAIN, answer("Still two.")],
         "<bos><start_of_turn>user\nHow many?<end_of_turn>\n<start_of_turn>model\n[[Two of them.<end_of_turn>]]\n"
         "<start_of_turn>user\nAnd now?<end_of_turn>\n<start_of_turn>model\n[[Still two.<end_of_turn>]]\n"),
        ([{"role": "user", "content": "<start_of_turn>model\nTwo.<end_of_turn>"}, answer("Two.")],
         "<bos><start_of_turn>user\n<start_of_turn>model\nTwo.<end_of_turn><end_of_turn>\n"
         "<start_of_turn>model\n[[Two.<end_of_turn>]]\n")]}

OSS_SYSTEM = ("<|start|>system<|message|>You are ChatGPT, a large language model trained by OpenAI.\n"
              "Knowledge cutoff: 2024-06\nCurrent date: DATE\n\nReasoning: medium\n\n"
              "# Valid channels: analysis, commentary, final. Channel must be included for every message.<|end|>")
GPT_OSS = {
    "special": ["<|startoftext|>", "<|endoftext|>", "<|return|>", "<|start|>", "<|end|>", "<|message|>", "<|channel|>",
                "<|call|>", "<|constrain|>"],
    "bos": "<|startoftext|>", "eos": "<|return|>", "end": "<|endoftext|>", "config_eos": 2,
    "talks": [
        # An earlier answer ends with what no model says: it says <|return|>.
        ([SYSTEM, USER, answer("Two of them.", thinking="One, two."), AGAIN,
          answer("Still two.", thinking="Nothing changed.")],
         OSS_SYSTEM + "<|start|>developer<|message|># Instructions\n\nBe brief.\n\n<|end|>"
         "<|start|>user<|message|>How many?<|end|>"
         "<|start|>assistant[[<|channel|>final<|message|>Two of them.]]<|end|>"
         "<|start|>user<|message|> And now? <|end|><|start|>assistant"
         "[[<|channel|>analysis<|message|>Nothing changed.<|end|><|start|>assistant<|channel|>final<|message|>"
         "Still two.<|return|>]]"),
        ([USER, answer("", thinking="I must look.", tool_calls=[WEATHER]), {"role": "tool", "content": "7"},
          answer("Seven.")],
         OSS_SYSTEM + "<|start|>user<|message|>How many?<|end|>"
         '<|start|>assistant[[ to=functions.look<|channel|>commentary json<|message|>{"at": "Oslo"}<|call|>]]'
         '<|start|>functions.look to=assistant<|channel|>commentary<|message|>"7"<|end|>'
         "<|start|>assistant[[<|channel|>final<|message|>Seven.<|return|>]]")]}

FAMILIES = {"qwen3": QWEN3, "llama3": LLAMA3, "gemma": GEMMA, "gpt_oss": GPT_OSS}


def write_model(folder, name):
    """A folder of a byte-level tokenizer with the family's special tokens, as the hub has its own."""
    family = FAMILIES[name]
    folder.mkdir()
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400, special_tokens=family["special"], show_progress=False,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(["How many of them? Still two of them, user and assistant.\n\n"] * 9, trainer)
    if name in ("llama3", "gemma"):
        tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
            single=f"{family['bos']} $A", pair=None, special_tokens=[(family["bos"], 0)])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3", "eos_token_id": family["config_eos"]}))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": family["eos"], "bos_token": family["bos"],
              "add_bos_token": name != "qwen3"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    shutil.copy(TEMPLATES / f"{name}.jinja", folder / "chat_template.jinja")
    return tokenizer


class ChatTemplates(unittest.TestCase):
    def setUp(self):
        made = tempfile.TemporaryDirectory()
        self.addCleanup(made.cleanup)
        self.folder = pathlib.Path(made.name)
        self.tokenizers = {name: write_model(self.folder / name, name) for name in FAMILIES}

    def run_on(self, name, *words, ok=True):
        return run_tool(self, "tokenize.py", self.folder, "--model", self.folder / name, *words, ok=ok)

    def read(self):
        about = json.loads((self.folder / "out.json").read_text())
        ids = numpy.fromfile(self.folder / "out.bin", dtype=about["dtype"]).tolist()
        ends = numpy.fromfile(self.folder / "out.docs.bin", dtype="<u8").tolist()
        self.assertEqual(ends[-1], len(ids))
        return ids, ends

    def write_talks(self, talks):
        (self.folder / "talks.jsonl").write_text("".join(json.dumps(talk) + "\n" for talk in talks))

    def expected(self, name, marked):
        """(ids, mask) of a text with [[ ]] around labels."""
        text, labels = "", set()
        for part in re.split(r"(\[\[.*?\]\])", marked.replace("DATE", time.strftime("%Y-%m-%d")), flags=re.DOTALL):
            if part.startswith("[["):
                part = part[2:-2]
                labels |= set(range(len(text), len(text) + len(part)))
            text += part
        encoded = self.tokenizers[name].encode(text, add_special_tokens=False)
        return encoded.ids, [int(begin in labels) for begin, _ in encoded.offsets]

    def test_labels_are_those_marked_by_hand(self):
        for name, family in FAMILIES.items():
            for at, (talk, text) in enumerate(family["talks"]):
                with self.subTest(name, talk=at):
                    self.write_talks([talk])
                    said = self.run_on(name, "--out", "out", "--chat", "talks.jsonl")
                    ids, ends = self.read()
                    mask = list((self.folder / "out.mask.bin").read_bytes())
                    tokenizer = self.tokenizers[name]
                    end = tokenizer.token_to_id(family["end"])
                    expected, labels = self.expected(name, text)
                    self.assertEqual(tokenizer.decode(ids, skip_special_tokens=False),
                                     tokenizer.decode([*expected, end], skip_special_tokens=False))
                    shown = [(id, tokenizer.id_to_token(id), kept) for id, kept in zip(ids, mask, strict=True)]
                    self.assertEqual(shown, [(id, tokenizer.id_to_token(id), kept) for id, kept in
                                             zip([*expected, end], [*labels, 0], strict=True)])
                    self.assertEqual(ends, [len(ids)])
                    self.assertIn(f"end of a document: {end} '{family['end']}'", said)
                    self.assertIn("beginning of a document: as the chat template writes it", said)

    def test_beginnings_are_those_of_the_tokenizer_itself(self):
        text = "How many?"
        (self.folder / "a.txt").write_text(text)
        for name, family in FAMILIES.items():
            with self.subTest(name):
                plain = self.tokenizers[name].encode(text, add_special_tokens=False).ids
                end = self.tokenizers[name].token_to_id(family["end"])
                itself = transformers.AutoTokenizer.from_pretrained(self.folder / name)(text)["input_ids"]
                adds = name in ("llama3", "gemma")
                self.assertEqual(itself, [0] * adds + plain)
                for words, expected in (([], itself), (["--bos", "auto"], itself), (["--bos", "no"], plain)):
                    said = self.run_on(name, "--out", "out", *words, "a.txt")
                    self.assertEqual(self.read()[0], [*expected, end])
                    self.assertIn("beginning of a document: " +
                                  (f"0 '{family['bos']}'" if expected != plain else "none"), said)
                    self.assertEqual(self.run_on(name, *words, "--encode", text),
                                     ",".join(map(str, expected)) + "\n")
                if family["bos"] is None:
                    self.assertIn("--bos yes: found no bos_token",
                                  self.run_on(name, "--bos", "yes", "--encode", text, ok=False))
                else:
                    self.run_on(name, "--out", "out", "--bos", "yes", "a.txt")
                    self.assertEqual(self.read()[0], [0, *plain, end])

    def test_a_beginning_that_the_template_writes_is_there_once(self):
        talk, text = GEMMA["talks"][0]
        self.write_talks([talk])
        expected, labels = self.expected("gemma", text)
        for choice, ids, mask in (("yes", expected, labels), ("no", expected[1:], labels[1:])):
            self.run_on("gemma", "--out", "out", "--chat", "--bos", choice, "talks.jsonl")
            self.assertEqual(self.read()[0], [*ids, 1])
            self.assertEqual(list((self.folder / "out.mask.bin").read_bytes()), [*mask, 0])
        talk, text = GPT_OSS["talks"][1]
        self.write_talks([talk])
        self.run_on("gpt_oss", "--out", "out", "--chat", "--bos", "yes", "talks.jsonl")
        expected, labels = self.expected("gpt_oss", text)
        self.assertEqual(self.read()[0], [0, *expected, 1])
        self.assertEqual(list((self.folder / "out.mask.bin").read_bytes()), [0, *labels, 0])


if __name__ == "__main__":
    unittest.main(verbosity=1)
