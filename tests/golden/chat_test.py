#!/usr/bin/env python3
"""tools/chat.py: answers of `tessera generate` against transformers' own, and what is handed to it.

Run by ctest with TESSERA_PROGRAM; leaves with 77 (skipped) where `tokenizers` or `transformers` is
missing, as with TESSERA_TORCH.
"""

import json
import os
import pathlib
import sys
import tempfile
import unittest
import unittest.mock

from chat_templates_test import write_model
from python_tool import needed, run_tool

torch, transformers = needed("torch", "transformers")

# Stands for the program: writes down its words, prints what ANSWERS has for each call.
PRETENDER = """#!{python}
import pathlib, sys
folder = pathlib.Path(__file__).parent
calls = folder / "calls"
calls.write_text((calls.read_text() if calls.exists() else "") + " ".join(sys.argv[1:]) + "\\n")
print((folder / "answers").read_text().splitlines()[len(calls.read_text().splitlines()) - 1])
"""


class Chat(unittest.TestCase):
    def setUp(self):
        made = tempfile.TemporaryDirectory()
        self.addCleanup(made.cleanup)
        self.enterContext(unittest.mock.patch.dict(os.environ, {"OMP_NUM_THREADS": "1"}))
        self.folder = pathlib.Path(made.name)

    def chat(self, *words, says="How many?\n", ok=True):
        return run_tool(self, "chat.py", self.folder, *words, ok=ok, says=says)

    def pretend(self, tokenizer, *answers):
        """A program that gives these answers, texts with special tokens."""
        program = self.folder / "program"
        program.write_text(PRETENDER.format(python=sys.executable))
        program.chmod(0o755)
        lines = [",".join(map(str, tokenizer.encode(text, add_special_tokens=False).ids)) for text in answers]
        (self.folder / "answers").write_text("\n".join(lines) + "\n")
        (self.folder / "calls").unlink(missing_ok=True)
        return "--program", program

    def calls(self, tokenizer):
        """(options, prompt as text) of each call."""
        found = []
        for line in (self.folder / "calls").read_text().splitlines():
            options, _, ids = line.rpartition(" --prompt-tokens ")
            found.append((options, tokenizer.decode([int(id) for id in ids.split(",")], skip_special_tokens=False)))
        return found

    def test_answers_are_those_of_transformers(self):
        tokenizer = write_model(self.folder / "qwen3", "qwen3")
        torch.manual_seed(4)
        model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(
            vocab_size=tokenizer.get_vocab_size(), hidden_size=32, intermediate_size=64, num_hidden_layers=2,
            num_attention_heads=2, num_key_value_heads=1, head_dim=16, max_position_embeddings=512,
            bos_token_id=None, pad_token_id=None, eos_token_id=2, tie_word_embeddings=False,
            initializer_range=0.3)).eval()
        model.save_pretrained(self.folder / "qwen3")
        auto = transformers.AutoTokenizer.from_pretrained(self.folder / "qwen3")
        expected, messages = "", [{"role": "system", "content": "Be brief."}]
        for line in ("How many?", "And now?"):
            messages.append({"role": "user", "content": line})
            ids = auto.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt",
                                           return_dict=True)["input_ids"]
            with torch.no_grad():
                made = model.generate(ids, max_new_tokens=12, do_sample=False)[0, ids.shape[1]:]
            text = tokenizer.decode([id for id in made.tolist() if id != 2], skip_special_tokens=False)
            messages.append({"role": "assistant", "content": text})
            expected += text + "\n"
        words = ("qwen3", "--program", os.environ["TESSERA_PROGRAM"], "--system", "Be brief.", "--max-new-tokens", 12)
        self.assertEqual(self.chat(*words, says="How many?\nAnd now?\n"), expected)
        drawn = self.chat(*words, "--temperature", 5, "--top-p", 0.9, "--seed", 1)
        self.assertNotEqual(drawn, self.chat(*words))
        # With a nucleus of one token the draw is the most likely one.
        self.assertEqual(self.chat(*words, "--temperature", 5, "--top-p", 1e-9), self.chat(*words))
        self.assertIn("--top-p: found '1.5'", self.chat(*words, "--top-p", 1.5, ok=False))

    def test_an_answer_ends_with_its_turn_and_is_handed_on(self):
        tokenizer = write_model(self.folder / "m", "qwen3")
        (self.folder / "m/config.json").write_text("{}")  # names no end
        program = self.pretend(tokenizer, "<think>\nOne.\n</think>\n\nTwo \u4e2d.<|im_end|>\n<|im_start|>user", "Still.")
        self.assertEqual(self.chat("m", *program, says="How many?\nAnd now?\n\nnot read\n"),
                         "<think>\nOne.\n</think>\n\nTwo \u4e2d.\nStill.\n")
        first, second = self.calls(tokenizer)
        self.assertEqual(first, ("generate --model m --max-new-tokens 512 --temperature 0.0",
                                 "<|im_start|>user\nHow many?<|im_end|>\n<|im_start|>assistant\n"))
        self.assertEqual(second[1], "<|im_start|>user\nHow many?<|im_end|>\n<|im_start|>assistant\nTwo \u4e2d.<|im_end|>\n"
                                    "<|im_start|>user\nAnd now?<|im_end|>\n<|im_start|>assistant\n")

    def test_the_parts_of_an_answer_of_gpt_oss_are_separated(self):
        tokenizer = write_model(self.folder / "m", "gpt_oss")
        answer = ("<|channel|>analysis<|message|>One.<|end|><|start|>assistant<|channel|>final<|message|>"
                  "Two of them.<|return|>")
        program = self.pretend(tokenizer, answer, "<|channel|>final<|message|>Still.<|return|>")
        self.assertEqual(self.chat("m", *program, says="How many?\nAnd now?\n"),
                         answer.removesuffix("<|return|>") + "\n<|channel|>final<|message|>Still.\n")
        self.assertTrue(self.calls(tokenizer)[1][1].endswith(
            "<|start|>user<|message|>How many?<|end|><|start|>assistant<|channel|>final<|message|>Two of them.<|end|>"
            "<|start|>user<|message|>And now?<|end|><|start|>assistant"))

    def test_what_is_said_is_in_the_prompt_or_refused(self):
        tokenizer = write_model(self.folder / "m", "qwen3")
        template = self.folder / "m/chat_template.jinja"
        template.write_text("{% for m in messages %}{% for part in m.content %}{{ m.role }}: {{ part.text }}<|im_end|>"
                            "{% endfor %}{% endfor %}")  # writes parts alone, of a text nothing
        self.chat("m", *self.pretend(tokenizer, "Two.<|im_end|>", "Still.<|im_end|>"), "--system", "Be brief.",
                  says="How many?\nAnd now?\n")
        self.assertEqual(self.calls(tokenizer)[1][1], "system: Be brief.<|im_end|>user: How many?<|im_end|>"
                                                      "assistant: Two.<|im_end|>user: And now?<|im_end|>")
        template.write_text("{% for m in messages %}{% if m.role != 'system' %}{{ m.content }}{% endif %}{% endfor %}")
        self.assertIn("the chat template writes nothing of what the system says in message 1 of 2",
                      self.chat("m", *self.pretend(tokenizer, "Two."), "--system", "Be brief.", ok=False))

    def test_how_to_draw_is_said_by_the_model_or_the_user(self):
        tokenizer = write_model(self.folder / "m", "gemma")
        about = self.folder / "m/generation_config.json"
        for says, words, options in (
                ({"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95}, [],
                 "--temperature 0.6 --top-k 20 --top-p 0.95"),
                ({"do_sample": True, "temperature": 0.6, "top_k": 20}, ["--top-k", 5, "--seed", 3],
                 "--temperature 0.6 --top-k 5 --seed 3"),
                ({"do_sample": True, "top_p": 0.9}, ["--temperature", 0], "--temperature 0.0"),
                ({"temperature": 0.6, "top_k": 20}, [], "--temperature 0.0"),
                ({"do_sample": True}, [], "--temperature 1.0"),
                ({"do_sample": True, "temperature": 0, "top_p": 0.9}, [], "--temperature 0.0"),
                ({"do_sample": True, "temperature": 0.0}, ["--top-k", 5], "--temperature 1.0 --top-k 5"),
                ({}, ["--top-p", 0.5], "--temperature 1.0 --top-p 0.5")):
            about.write_text(json.dumps(says))
            self.chat("m", *self.pretend(tokenizer, "Two."), *words)
            self.assertEqual(self.calls(tokenizer)[0], (f"generate --model m --max-new-tokens 512 {options}",
                             "<bos><start_of_turn>user\nHow many?<end_of_turn>\n<start_of_turn>model\n"))

    def test_a_run_takes_the_tokenizer_of_where_it_began(self):
        tokenizer = write_model(self.folder / "m", "llama3")
        step = self.folder / "run/checkpoint/step-3"
        step.mkdir(parents=True)
        (self.folder / "run/config.toml").write_text(f"[model]\npath = '{self.folder / 'm'}'\n")
        for model in ("run", "run/checkpoint/step-3"):
            self.assertEqual(self.chat(model, *self.pretend(tokenizer, "Two.<|eot_id|>")), "Two.\n")
            self.assertIn(f"--model {model} ", self.calls(tokenizer)[0][0])

    def test_what_cannot_be_used_is_refused_in_a_line(self):
        tokenizer = write_model(self.folder / "m", "gemma")
        program = self.pretend(tokenizer, "Two.")
        (self.folder / "empty").mkdir()
        self.assertIn("name the folder of the tokenizer", self.chat("empty", *program, ok=False))
        self.assertIn("nowhere is not there", self.chat("m", "--program", "nowhere", ok=False))
        self.assertIn("System role not supported", self.chat("m", *program, "--system", "Be brief.", ok=False))
        self.assertIn("--max-new-tokens", self.chat("m", *program, "--max-new-tokens", "many", ok=False))
        self.assertIn("standard input: found bytes that are not UTF-8", self.chat("m", *program, says=b"\xff\n", ok=False))
        (self.folder / "nothing.jinja").write_text("\n")
        self.assertIn("nothing.jinja: found an empty file",
                      self.chat("m", *program, "--chat-template", "nothing.jinja", ok=False))
        (self.folder / "m/chat_template.jinja").unlink()
        self.assertIn("no chat template", self.chat("m", *program, ok=False))
        (self.folder / "program").write_text(f"#!{sys.executable}\nimport sys; sys.exit('tessera: bad model')\n")
        (self.folder / "m/chat_template.jinja").write_text("{{ messages[-1].content }}{{ eos_token }}")
        self.assertEqual(self.chat("m", *program, ok=False), "chat: bad model\n")


if __name__ == "__main__":
    unittest.main(verbosity=1)
