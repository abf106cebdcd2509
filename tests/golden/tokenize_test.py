#!/usr/bin/env python3
"""tools/tokenize.py: its files against the tokenizer itself, and a training run on them.

Run by ctest with TESSERA_PROGRAM; leaves with 77 (skipped) where `tokenizers`, `transformers` or
`pyarrow` is missing, as with TESSERA_TORCH.
"""

import json
import os
import pathlib
import resource
import signal
import subprocess
import sys
import tempfile
import time
import unittest
import unittest.mock

from python_tool import TOOLS, needed, run_tool

numpy, pyarrow, _, tokenizers, _ = needed("numpy", "pyarrow", "pyarrow.parquet", "tokenizers", "transformers")

TOOL = TOOLS / "tokenize.py"
END = "<|end|>"
# As most published templates are: no marks, a prompt for the answer, an end of turn.
PLAIN_TEMPLATE = ("{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|turn|>\n{% endfor %}"
                  "{% if add_generation_prompt %}<|assistant|>{% endif %}")
MARKED_TEMPLATE = ("{% for m in messages %}{% if m.role == 'assistant' %}<|assistant|>{% generation %}"
                   "{{ m.content }}<|turn|>{% endgeneration %}{{ '\n' }}{% else %}<|{{ m.role }}|>"
                   "{{ m.content }}<|turn|>\n{% endif %}{% endfor %}")
# Only the last answer keeps its first word, as templates do that drop earlier reasoning.
REWRITING_TEMPLATE = ("{% for m in messages %}{% if m.role == 'assistant' and not loop.last %}"
                      "<|assistant|>...<|turn|>{% else %}<|{{ m.role }}|>{{ m.content }}<|turn|>{% endif %}"
                      "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}")
TALK = [{"role": "user", "content": "How many words?"}, {"role": "assistant", "content": "Three words."},
        {"role": "user", "content": "And now?"}, {"role": "assistant", "content": "Two words, still."}]


def some_text(lines):
    """Words, numbers, runs of white space, and characters of two to four bytes."""
    words = ["the", "cat", "sat", "na\u00efve", "\u4e2d\u6587", "\U0001F600", "x1", "(and)", "don't", "  ", "\t"]
    return "".join(" ".join(words[(i * 7 + j * 3) % len(words)] for j in range(i % 9)) + "\n" * (1 + i % 3)
                   for i in range(lines))


def write_model(folder):
    """tokenizer.json of byte-level tokens, with a config.json that names the end of a text."""
    folder.mkdir()
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=600, special_tokens=[END, "<|user|>", "<|assistant|>", "<|turn|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    tokenizer.train_from_iterator([some_text(400)], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 16,
        "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8,
        "intermediate_size": 32, "vocab_size": 600, "max_position_embeddings": 64,
        "eos_token_id": tokenizer.token_to_id(END)}))
    (folder / "tokenizer_config.json").write_text(json.dumps(
        {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "chat_template": PLAIN_TEMPLATE}))
    return tokenizer


class Tokenize(unittest.TestCase):
    def setUp(self):
        self.made = tempfile.TemporaryDirectory()
        self.folder = pathlib.Path(self.made.name)
        self.tokenizer = write_model(self.folder / "model")
        self.end = self.tokenizer.token_to_id(END)
        self.size = self.tokenizer.get_vocab_size()

    def tearDown(self):
        self.made.cleanup()

    def run_tool(self, *words, ok=True):
        return run_tool(self, "tokenize.py", self.folder, "--model", self.folder / "model", *words, ok=ok)

    def read(self, name="out"):
        about = json.loads((self.folder / f"{name}.json").read_text())
        ids = numpy.fromfile(self.folder / f"{name}.bin", dtype=about["dtype"])
        self.assertEqual(about["num_tokens"], len(ids))
        return about, ids.tolist()

    def ids_of(self, text):
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def test_documents_are_separated_and_in_order(self):
        books = self.folder / "books"
        books.mkdir()
        (books / "b.txt").write_text("second the cat")
        (books / "a.txt").write_text("first sat")
        (books / "c.md").write_text("not text")
        (self.folder / "last.txt").write_text("last")
        (self.folder / "empty.txt").write_text("")
        (self.folder / "list").write_text(f"{books}\nlast.txt\nempty.txt\n")
        expected = [id for text in ("first sat", "second the cat", "last", "")
                    for id in self.ids_of(text) + [self.end]]
        for words in ([books, "last.txt", "empty.txt"], ["@list"]):
            self.run_tool("--out", "out", *words)
            about, ids = self.read()
            self.assertEqual(ids, expected)
            self.assertEqual(about, {"dtype": "uint16", "num_tokens": len(ids), "vocab_size": self.size})
        self.run_tool("--out", "out", "--no-eos", "last.txt")
        self.assertEqual(self.read()[1], self.ids_of("last"))
        self.run_tool("--out", "out", "--eos", "<|turn|>", "last.txt")
        self.assertEqual(self.read()[1], self.ids_of("last") + [self.tokenizer.token_to_id("<|turn|>")])

    def test_a_missing_package_is_named_with_the_way_to_get_it(self):
        (self.folder / "talk.jsonl").write_text(json.dumps(TALK) + "\n")
        for package, words in (("tokenizers", ["--encode", "a"]),
                               ("transformers", ["--out", "out", "--chat", "talk.jsonl"])):
            with unittest.mock.patch.dict(sys.modules, {package: None}):
                said = self.run_tool(*words, ok=False)
            self.assertIn(f"found no package {package} ", said)
            self.assertIn(f"-m pip install {package}", said)
            self.assertIn("scripts/bootstrap --with-tools", said)
        # As a person meets it: -S leaves out installed packages.
        bare = subprocess.run([sys.executable, "-S", TOOL, "--model", "model", "--encode", "a"], cwd=self.folder,
                              capture_output=True, text=True, check=False)
        self.assertEqual(bare.returncode, 2)
        self.assertRegex(bare.stderr, r"\Atokenize: found no package tokenizers [^\n]+\n\Z")

    def test_lines_and_rows_are_documents(self):
        texts = ["the cat", "", "na\u00efve \u4e2d\u6587\nsat", "x1"]
        (self.folder / "a.jsonl").write_text("".join(json.dumps({"text": text, "n": 1}) + "\n\n" for text in texts))
        (self.folder / "b.jsonl").write_text("".join(json.dumps(text) + "\n" for text in texts))
        pyarrow.parquet.write_table(pyarrow.table({"n": [1] * 4, "body": texts}), self.folder / "c.parquet",
                                    row_group_size=3)
        several = self.folder / "several"
        several.mkdir()
        (several / "1.txt").write_text(texts[0])
        (several / "2.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts[1:]))
        expected, ends = [], []
        for text in texts:
            expected += self.ids_of(text) + [self.end]
            ends.append(len(expected))
        for words in (["a.jsonl"], ["b.jsonl"], ["--field", "body", "c.parquet"], ["several"]):
            self.run_tool("--out", "out", *words)
            self.assertEqual(self.read()[1], expected, words)
            self.assertEqual(self.ends(), ends)
        self.run_tool("--out", "out", "--no-eos", "a.jsonl")
        without = [end - 1 - i for i, end in enumerate(ends)]
        self.assertEqual(self.ends(), [without[0], *without[2:]])  # the second is empty

    def ends(self):
        return numpy.fromfile(self.folder / "out.docs.bin", dtype="<u8").tolist()

    def test_rows_of_a_table_are_conversations(self):
        talks = [TALK, TALK[:2], [TALK[0], {**TALK[1], "tool_calls": [{"name": "f", "arguments": "{}"}]}]]
        (self.folder / "calls.jinja").write_text(PLAIN_TEMPLATE.replace("m.content", "m.content ~ m.tool_calls"))
        words = ["--chat", "--chat-template", "calls.jinja"]
        pyarrow.parquet.write_table(pyarrow.table({"messages": talks}), self.folder / "talks.parquet")
        self.run_tool("--out", "rows", *words, "talks.parquet")
        self.write_talks(*talks)
        self.run_tool("--out", "lines", *words, "talks.jsonl")
        (self.folder / "lines").mkdir()
        (self.folder / "talks.parquet").rename(self.folder / "lines/talks.parquet")
        self.run_tool("--out", "folder", *words, "lines")
        for ending in ("bin", "json", "mask.bin", "labels.bin", "docs.bin"):
            content = (self.folder / f"lines.{ending}").read_bytes()
            self.assertEqual((self.folder / f"rows.{ending}").read_bytes(), content, ending)
            self.assertEqual((self.folder / f"folder.{ending}").read_bytes(), content, ending)

    def test_tables_that_cannot_be_read_are_refused(self):
        texts = [some_text(20 + i) for i in range(400)]
        pyarrow.parquet.write_table(pyarrow.table({"text": texts}), self.folder / "whole.parquet", row_group_size=100)
        whole = (self.folder / "whole.parquet").read_bytes()
        torn = bytearray(whole)
        torn[len(whole) // 2:len(whole) // 2 + 400] = bytes(400)  # its head and its end are as they were
        for content in (whole[:-1], whole[:len(whole) // 2], b"", b"text\n", bytes(torn)):
            (self.folder / "torn.parquet").write_bytes(content)
            self.assertIn("torn.parquet: found no whole parquet file",
                          self.run_tool("--out", "out", "torn.parquet", ok=False))
        self.assertIn("whole.parquet: found the columns text, expected one of the name messages",
                      self.run_tool("--out", "out", "--chat", "whole.parquet", ok=False))
        self.assertIn("nope.parquet: No such file", self.run_tool("--out", "out", "nope.parquet", ok=False))
        pyarrow.parquet.write_table(pyarrow.table({"text": ["a", None]}), self.folder / "null.parquet")
        self.assertIn("null.parquet: row 2: found no text in the field text",
                      self.run_tool("--out", "out", "null.parquet", ok=False))
        (self.folder / "a.jsonl").write_text('{"text": "a"}\n{"body": "a"}\n')
        self.assertIn("a.jsonl:2: found no text in the field text", self.run_tool("--out", "out", "a.jsonl", ok=False))
        (self.folder / "a.jsonl").write_text('{"text": "a"}\n{"text": "\\ud800"}\n')
        self.assertIn("a.jsonl:2: found half of a surrogate", self.run_tool("--out", "out", "a.jsonl", ok=False))
        self.assertEqual(list(self.folder.glob("out*")), [])
        with unittest.mock.patch.dict(sys.modules, {"pyarrow": None, "pyarrow.parquet": None}):
            self.assertIn("-m pip install pyarrow", self.run_tool("--out", "out", "whole.parquet", ok=False))

    def test_the_index_counts_labels_to_the_end_of_each_block(self):
        tokens = 0
        for times in (1, 150, 600):
            self.write_talks(*[TALK] * times)
            self.run_tool("--out", "out", "--chat", "talks.jsonl")
            mask = numpy.fromfile(self.folder / "out.mask.bin", dtype="u1") != 0
            index = numpy.fromfile(self.folder / "out.labels.bin", dtype="<u8").tolist()
            blocks = range(0, len(mask), 4096)
            self.assertEqual(index, [len(mask)] + [int(mask[:begin + 4096].sum()) for begin in blocks])
            self.assertEqual(self.ends(), [len(mask) // times * (i + 1) for i in range(times)])
            tokens = len(mask)
        self.assertGreater(tokens, 3 * 4096)
        self.run_tool("--out", "out", "--chat", "--no-eos", "talks.jsonl")  # a longer file was here before
        self.assertEqual(numpy.fromfile(self.folder / "out.labels.bin", dtype="<u8")[0], self.read()[0]["num_tokens"])

    def test_the_end_of_a_document_is_that_of_texts_not_of_turns(self):
        (self.folder / "a.txt").write_text("the")
        about = self.folder / "model/tokenizer_config.json"
        for eos, words, expected in (("<|turn|>", [], "<|turn|>"), (END, [], END), (END, ["--eos", "<|turn|>"], "<|turn|>")):
            about.write_text(json.dumps({"eos_token": eos}))
            said = self.run_tool("--out", "out", *words, "a.txt")
            self.assertEqual(self.read()[1][-1], self.tokenizer.token_to_id(expected))
            self.assertIn(f"'{expected}' ({'--eos' if words else 'eos_token of tokenizer_config.json'})", said)
        self.assertIn("end of a document: none (--no-eos)", self.run_tool("--out", "out", "--no-eos", "a.txt"))

    def test_windows_give_the_tokens_of_the_whole(self):
        text = some_text(600)
        (self.folder / "a.txt").write_text(text)
        for window in (100, 257, 1000, 1 << 20):
            self.run_tool("--out", "out", "--window", str(window), "--context", "64", "a.txt")
            self.assertEqual(self.read()[1], self.ids_of(text) + [self.end], window)

    def test_memory_does_not_grow_with_the_text(self):
        text = some_text(2000)
        peaks = []
        for times in (4, 40):
            (self.folder / "a.txt").write_text(text * times)
            script = ("import resource, runpy, sys; sys.argv = sys.argv[1:]; "
                      "runpy.run_path(sys.argv[0], run_name='__main__'); "
                      "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)")
            done = subprocess.run(
                [sys.executable, "-c", script, TOOL, "--model", "model", "--out", "out", "--window", "65536",
                 "a.txt"], capture_output=True, text=True, cwd=self.folder, check=True)
            peaks.append(int(done.stdout.split()[-1]) / 1024)
        # The text is 2.2 MB, then 22 MB; encoded at once that is 250 MB more.
        self.assertLess(peaks[1] - peaks[0], 30, peaks)

    def test_wide_ids_where_the_vocabulary_needs_them(self):
        source = json.loads((self.folder / "model/tokenizer.json").read_text())
        source["added_tokens"].append({"id": 70000, "content": "<|far|>", "single_word": False, "lstrip": False,
                                       "rstrip": False, "normalized": False, "special": True})
        source["model"]["vocab"]["<|far|>"] = 70000
        (self.folder / "model/tokenizer.json").write_text(json.dumps(source))
        (self.folder / "a.txt").write_text("the<|far|>")
        self.run_tool("--out", "out", "a.txt")
        about, ids = self.read()
        self.assertEqual((about["dtype"], about["vocab_size"]), ("uint32", 70001))
        self.assertEqual(ids[-2:], [70000, self.end])

    def test_encode_and_decode_are_inverse(self):
        ids = self.run_tool("--encode", "the cat sat").strip()
        self.assertEqual(ids, ",".join(map(str, self.ids_of("the cat sat"))))
        self.assertEqual(self.run_tool("--decode", ids), "the cat sat\n")

    def test_a_result_that_cannot_be_written_is_said_and_one_that_has_no_reader_is_not(self):
        (self.folder / "a.txt").write_text("the cat")
        ids = ",".join(map(str, self.ids_of("hi")))
        about = r"beginning of text: [^\n]+\n"
        for words, closed, code, out, err in (
                ("--encode hi", "", 0, ids + "\n", about),
                ("--encode hi", ">&-", 1, "", about + r"tokenize: standard output: [^\n]+\n"),
                ("--encode hi", ">/dev/full", 1, "", about + r"tokenize: standard output: No space left on device\n"),
                ("--encode hi", "2>&-", 0, ids + "\n", ""),
                ("--decode 1", ">&-", 1, "", r"tokenize: standard output: [^\n]+\n"),
                ("--decode - <many", ">/dev/full", 1, "", r"tokenize: standard output: No space left on device\n"),
                ("--encode hi", "| true", 0, "", about),
                ("--decode - <many", "| true", 0, "", ""),
                ("--out out a.txt", ">&-", 0, "", r"a\.txt: [^\n]+\n"),
                ("--out out a.txt", ">/dev/full", 0, "", r"a\.txt: [^\n]+\n")):
            (self.folder / "many").write_text(",".join(["70"] * 20_000))
            done = subprocess.run(
                ["bash", "-o", "pipefail", "-c", f'"$0" "$1" --model model {words} {closed}', sys.executable, TOOL],
                capture_output=True, text=True, cwd=self.folder, check=False)
            with self.subTest(words, closed=closed):
                self.assertEqual((done.returncode, done.stdout), (code, out), done.stderr)
                self.assertRegex(done.stderr, rf"\A{err}\Z")
        self.assertEqual(self.read()[1], [*self.ids_of("the cat"), self.end])

    def test_refusals_leave_no_file(self):
        (self.folder / "a.txt").write_bytes(b"\xff\xfe not text")
        self.assertIn("not UTF-8", self.run_tool("--out", "out", "a.txt", ok=False))
        self.assertIn("no *.txt", self.run_tool("--out", "out", "model", ok=False))
        self.assertEqual(list(self.folder.glob("out*")), [])
        (self.folder / "model/config.json").unlink()
        (self.folder / "model/tokenizer_config.json").unlink()
        self.assertIn("--no-eos", self.run_tool("--out", "out", "a.txt", ok=False))

    def begin(self, *words, **how):
        return subprocess.Popen([sys.executable, TOOL, "--model", "model", *words], cwd=self.folder, text=True,
                                stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, **how)

    def test_a_file_that_cannot_be_written_is_named_and_nothing_is_left(self):
        def no_room():  # a file of more bytes is refused as on a full disk, with another reason
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
        (self.folder / "long.txt").write_text(some_text(3000))
        (self.folder / "out.bin").write_text("of an earlier run")
        with self.begin("--out", "out", "long.txt", preexec_fn=no_room) as tool:
            said = tool.stderr.read()
        self.assertEqual(tool.returncode, 1, said)
        self.assertRegex(said, r"\Atokenize: out\.bin\.tmp: File too large\n\Z")
        self.assertEqual([file.name for file in self.folder.glob("out*")], ["out.bin"])
        self.assertEqual((self.folder / "out.bin").read_text(), "of an earlier run")

    def test_one_that_is_ended_leaves_nothing(self):
        os.mkfifo(self.folder / "slow.txt")  # without a writer
        with self.begin("--out", "out", "slow.txt") as tool:
            while tool.poll() is None and not (self.folder / "out.json.tmp").exists():
                time.sleep(0.01)
            tool.terminate()
        self.assertEqual(tool.returncode, 128 + signal.SIGTERM)
        self.assertEqual(list(self.folder.glob("out*")), [])

    def test_what_cannot_be_used_is_refused_in_a_line(self):
        (self.folder / "bad.jsonl").write_bytes(b'[{"role": "user", "content": "\xff"}]\n')
        (self.folder / "torn.list").write_bytes(b"\xff\xfe\n")
        (self.folder / "a.txt").write_text("the cat")
        gap = self.size
        (self.folder / "nothing.jinja").write_text("")
        for words, says in (
                (["--out", "out", "--chat", "--chat-template", "nothing.jinja", "bad.jsonl"],
                 "nothing.jinja: found an empty file"),
                (["--out", "out", "--eos", END, "--no-eos", "a.txt"], "not allowed with argument --eos"),
                (["--out", "out", "--encode", "a"], "not allowed with argument --out"),
                (["--out", "out", "nope.txt"], "nope.txt: No such file"),
                (["--out", "out", "--chat", "nope.jsonl"], "nope.jsonl: No such file"),
                (["--out", "out", "--chat", "--chat-template", "nope.jinja", "bad.jsonl"], "nope.jinja: No such file"),
                (["--out", "out", "--chat", "bad.jsonl"], "bad.jsonl:1: found bytes that are not UTF-8"),
                (["--out", "out", "@nope.list"], "nope.list"),
                (["--out", "out", "@torn.list"], "encoding"),
                (["--out", "a.txt/out", "a.txt"], "a.txt"),
                (["--out", "out", "--window", "0", "a.txt"], "--window"),
                (["--out", "out"], "--out NAME"),
                (["--unknown"], "--unknown"),
                (["--encode", "a\udc80"], "expected UTF-8"),
                (["--decode", "x"], "found 'x', expected token ids"),
                (["--decode", ""], "found '', expected token ids"),
                (["--decode=-1"], "found '-1', expected token ids"),
                (["--decode", "1,2," + "9" * 30], "expected token ids"),
                (["--decode", f"1,2,{gap}"], f"found the id {gap}, expected one of the tokenizer's {gap}"),
                (["--decode", "4294967296"], "found the id 4294967296")):
            self.assertIn(says, self.run_tool(*words, ok=False), words)
        self.assertEqual(list(self.folder.glob("out*")), [])
        for name, text in (("tokenizer_config.json", "{"), ("tokenizer_config.json", "{}"), ("config.json", "{"),
                           ("config.json", "[]"), ("config.json", '{"eos_token_id": -1}'), ("config.json", "{}"),
                           ("config.json", '{"eos_token_id": [1, 2]}'), ("tokenizer.json", "{}")):
            if text == "{}" and name == "tokenizer_config.json":
                (self.folder / "model" / name).write_text(text)
                self.run_tool("--out", "out", "a.txt")  # config.json has one
                (self.folder / "out.bin").unlink()
                continue
            (self.folder / "model" / name).write_text(text)
            self.assertIn(name, self.run_tool("--out", "out", "a.txt", ok=False), text)
        (self.folder / "model/tokenizer.json").unlink()
        self.assertIn("tokenizer.json is not there", self.run_tool("--out", "out", "a.txt", ok=False))

    def write_talks(self, *talks):
        (self.folder / "talks.jsonl").write_text("".join(json.dumps(talk) + "\n" for talk in talks))

    def check_talk(self, ids, mask):
        """What is kept is what the assistant says, with its end of turn; the rest is the whole talk."""
        kept, runs = [], 0
        for i, (id, on) in enumerate(zip(ids, mask)):
            if on:
                runs += i == 0 or not mask[i - 1]
                kept.append(id)
        self.assertEqual(self.tokenizer.decode(kept, skip_special_tokens=False),
                         "Three words.<|turn|>Two words, still.<|turn|>")
        self.assertEqual(runs, 2)
        whole = "".join(f"<|{m['role']}|>{m['content']}<|turn|>\n" for m in TALK)
        self.assertEqual(ids, self.ids_of(whole) + [self.end])
        self.assertEqual(mask[-1], 0)

    def test_chat_masks_all_but_the_assistant(self):
        template = self.folder / "marked.jinja"
        template.write_text(MARKED_TEMPLATE)
        for words in ([], ["--chat-template", template]):
            self.write_talks(TALK, {"messages": TALK})
            self.run_tool("--out", "out", "--chat", *words, "talks.jsonl")
            ids, mask = self.read()[1], (self.folder / "out.mask.bin").read_bytes()
            self.assertEqual(len(mask), len(ids))
            half = len(ids) // 2
            self.check_talk(ids[:half], mask[:half])
            self.check_talk(ids[half:], mask[half:])

    def test_chat_that_cannot_be_masked_is_refused_by_line(self):
        template = self.folder / "rewriting.jinja"
        template.write_text(REWRITING_TEMPLATE)
        self.write_talks(TALK[:2], TALK)
        self.assertIn("talks.jsonl:2: the chat template rewrites earlier turns",
                      self.run_tool("--out", "out", "--chat", "--chat-template", template, "talks.jsonl", ok=False))
        for line, says in (("{", "talks.jsonl:1"), ("[]", "expected a list"), ("", "found no document"),
                           ("[" * 100_000, "talks.jsonl:1"),
                           ('[{"role": "user", "content": "x"}]', "nothing to train on"),
                           ('[{"role": "assistant", "content": "x"}]', "found an answer first"),
                           ('[{"role": "user", "content": "\\ud800"}, {"role": "assistant", "content": "x"}]',
                            "talks.jsonl:1: found half of a surrogate pair")):
            (self.folder / "talks.jsonl").write_text(line + "\n")
            self.assertIn(says, self.run_tool("--out", "out", "--chat", "talks.jsonl", ok=False))

    def test_a_mask_of_an_earlier_file_does_not_stay(self):
        self.write_talks(TALK)
        self.run_tool("--out", "out", "--chat", "talks.jsonl")
        (self.folder / "a.txt").write_text("the cat")
        self.run_tool("--out", "out", "a.txt")
        self.assertFalse((self.folder / "out.mask.bin").exists())
        self.assertFalse((self.folder / "out.labels.bin").exists())
        self.assertEqual(self.ends(), [self.read()[0]["num_tokens"]])

    def test_tessera_trains_on_the_result(self):
        self.write_talks(*[TALK] * 20)
        self.run_tool("--out", "out", "--chat", "talks.jsonl")
        index = self.folder / "out.labels.bin"
        written = index.read_bytes()
        index.unlink()  # the program makes one
        (self.folder / "run.toml").write_text(
            '[model]\nconfig = "model/config.json"\n[data]\npath = "out.bin"\n[training]\nsteps = 2\n'
            'seq_len = 16\nglobal_batch_size = 4\n[optimizer]\nlr = 0.01\n[job]\ndump_folder = "run"\n')
        done = subprocess.run([os.environ["TESSERA_PROGRAM"], "train", "run.toml"], capture_output=True, text=True,
                              cwd=self.folder)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(index.read_bytes(), written)
        steps = [json.loads(line) for line in (self.folder / "run/metrics/metrics.jsonl").read_text().splitlines()]
        self.assertEqual([step["step"] for step in steps], [1, 2])
        self.assertAlmostEqual(steps[0]["loss"], numpy.log(600), delta=0.2)  # vocab_size, drawn weights: nearly uniform


if __name__ == "__main__":
    unittest.main(verbosity=1)
