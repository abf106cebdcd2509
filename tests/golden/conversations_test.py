#!/usr/bin/env python3
"""tools/tokenize.py --chat: drawn conversations in every form that data sets have give the very files that
they give as messages of text, under each template; and what is not text, or would be lost, is refused by
conversation, message and part or key.

Run by ctest; leaves with 77 (skipped) where `tokenizers`, `transformers` or `pyarrow` is missing, as with
TESSERA_TORCH.
"""

import copy
import json
import pathlib
import random
import tempfile
import unittest

from chat_templates_test import FAMILIES, WEATHER, write_model
from python_tool import needed, run_tool
from tokenize_test import MARKED_TEMPLATE, PLAIN_TEMPLATE

pyarrow, _ = needed("pyarrow", "pyarrow.parquet")

# As models that see have it: a text, which is no list, has no parts.
PARTS_TEMPLATE = ("{% for m in messages %}<|im_start|>{{ m.role }}\n{% for part in m.content %}{% if part.type == 'text' "
                  "%}{{ part.text }}{% endif %}{% endfor %}<|im_end|>\n{% endfor %}"
                  "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
STRINGS_TEMPLATE = PARTS_TEMPLATE.replace("{% for part in m.content %}{% if part.type == 'text' %}{{ part.text }}"
                                          "{% endif %}{% endfor %}", "{{ m.content }}")
OWN_TEMPLATES = {"plain": PLAIN_TEMPLATE, "marked": MARKED_TEMPLATE, "parts": PARTS_TEMPLATE}
TEMPLATES = [*FAMILIES, *OWN_TEMPLATES]
SPEAKERS = {"user": ["human", "user"], "assistant": ["gpt", "assistant", "chatgpt", "bot", "model"],
            "system": ["system"], "tool": ["tool", "observation", "function_response"]}
WORDS = ["How", "many?", " ", "\n", "na\u00efve", "\u4e2d\u6587", "two", "'type'", "[", "{\"text\":", "\U0001F600", "it's", "q0x"]
OTHER_PARTS = [{"type": "image_url", "image_url": {"url": "a.png"}}, {"type": "image"}, {"type": "input_audio"},
               {"type": "tool_use", "name": "look"}, {"type": "thinking", "thinking": "a"}, {"type": "text"},
               {"type": "text", "text": None}, {"type": "text", "text": ["a"]}, {"text": "a"}, "a", None, 7, ["a"], {}]
# Keys that say nothing of a message, and such as are empty.
INERT_KEYS = [{"id": "a1"}, {"timestamp": 1700000000}, {"model": "m"}, {"score": 0.5}, {"name": "a"}, {"metadata": {"a": 1}},
              {"token_count": 7}, {"images": []}, {"image": None}, {"audio": {}}, {"refusal": None}, {"refusal": ""},
              {"thinking": False}, {"notes": ""}, {"tool_calls": []}, {"annotations": []}, {"documents": None}]
# Keys that say something which no template here writes.
LOST_KEYS = [{"images": ["a.png"]}, {"image": "a.png"}, {"audio": {"id": "a"}}, {"video": "a.mp4"}, {"videos": ["a.mp4"]},
             {"refusal": "I cannot."},
             {"notes": "One."}, {"attachments": [{"name": "a"}]}, {"function_call": {"name": "look"}}, {"masked": True},
             {"documents": ["a"]}, {"markdown": "One."}, {"train_detail": [{"begin_offset": 0}]}, {"weight": 0.5},
             {"weight": "0"}, {"train": "no"}, {"loss": -1}]
# And such as some templates write of an answer, under each name.
THOUGHTS, WRITE_THOUGHTS = ("reasoning_content", "reasoning", "thinking"), ("qwen3", "gpt_oss")
SWITCHES_ON = [{"weight": 1}, {"weight": 1.0}, {"train": True}, {"loss": True}, {"weight": None}]
SWITCHES_OFF = [{"weight": 0}, {"weight": 0.0}, {"train": False}, {"loss": False}, {"weight": 1, "train": False}]
ENDINGS = ("bin", "json", "mask.bin", "labels.bin", "docs.bin")


def some_text(draw, least=0):
    return "".join(draw.choices(WORDS, k=draw.randint(least, 6)))


def drawn_talk(draw, template, tools=False):
    """Turns in pairs; the last one is an answer."""
    talk = []
    if template not in ("gemma", "marked") and draw.random() < 0.4:
        talk.append({"role": "system", "content": "Be brief." + some_text(draw)})
    for _ in range(draw.randint(1, 3)):
        talk.append({"role": "user", "content": some_text(draw)})
        if tools and template in ("qwen3", "gpt_oss"):
            talk += [{"role": "assistant", "content": "", "tool_calls": [WEATHER]},
                     {"role": "tool", "content": some_text(draw, 1)}]
        talk.append({"role": "assistant", "content": "It is " + some_text(draw)})
    return talk


def in_parts(draw, text):
    """Parts that together are the text; there may be none of an empty one."""
    cuts = sorted(draw.choices(range(len(text) + 1), k=draw.randint(0, 3)))
    parts = [text[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(text)])]
    return [{"type": "text", "text": part} for part in parts if part or draw.random() < 0.5]


def with_parts(draw, talk, share=1.0):
    return [{**m, "content": in_parts(draw, m["content"]) if draw.random() < share else m["content"]} for m in talk]


def as_sharegpt(draw, talk):
    return {"conversations": [{"from": draw.choice(SPEAKERS[m["role"]]), "value": m["content"]} for m in talk]}


def with_own_system(draw, talk):
    if talk[0]["role"] != "system":
        return talk
    return {"system": talk[0]["content"], **as_sharegpt(draw, talk[1:])}


def with_system_prompt(draw, talk):
    found = with_own_system(draw, talk)
    return {"system_prompt": found.pop("system"), **found} if "system" in found else found


def with_keys(*kinds):
    """Adds some of these keys to each message."""
    return lambda draw, talk: [{**m, **{k: v for kind in draw.sample(kinds, min(3, len(kinds))) for k, v in kind.items()}}
                               for m in talk]


def in_both_spellings(draw, talk):
    return [{**m, **draw.choice([{"value": m["content"]}, {"from": draw.choice(SPEAKERS[m["role"]])}, {"value": ""}])}
            for m in talk]


def with_prompt(draw, talk):
    return {"messages": talk, **draw.choice([{"prompt": talk[0]["content"]}, {"prompt": talk[:-1]}, {"completion": ""},
                                             {"conversations": []}, {"system_prompt": "", "documents": []},
                                             {"prompt": talk[:-1], "completion": talk[-1:]}, {"prompt": None}])}


FORMS = {
    "object": lambda draw, talk: {"messages": talk, "tools": None},
    "parts": with_parts,
    "some parts": lambda draw, talk: {"messages": with_parts(draw, talk, 0.5)},
    "sharegpt": as_sharegpt,
    "sharegpt of parts": lambda draw, talk: as_sharegpt(draw, with_parts(draw, talk, 0.5)),
    "speakers as roles": lambda draw, talk: [{**m, "role": draw.choice(SPEAKERS[m["role"]])} for m in talk],
    "messages as conversations": lambda draw, talk: {"conversations": with_parts(draw, talk, 0.3)},
    "system outside": with_own_system,
    "system prompt outside": with_system_prompt,
    "values of roles": lambda draw, talk: [{"role": m["role"], "value": m["content"]} for m in talk],
    "both spellings": in_both_spellings,
    "two forms": lambda draw, talk: {"messages": talk, **as_sharegpt(draw, with_parts(draw, talk, 0.3))},
    "prompt outside": with_prompt,
    "keys that say nothing": with_keys(*INERT_KEYS),
    "switches that are on": with_keys(*SWITCHES_ON),
    "switches of the user": lambda draw, talk: [
        {**m, **draw.choice(SWITCHES_OFF)} if m["role"] == "user" else m for m in talk],
    "origin outside": lambda draw, talk: {"from": "alpaca", **as_sharegpt(draw, talk)},
}


class Conversations(unittest.TestCase):
    def setUp(self):
        made = tempfile.TemporaryDirectory()
        self.addCleanup(made.cleanup)
        self.folder = pathlib.Path(made.name)
        self.draw = random.Random(20261128)

    def model_of(self, template):
        """Words for the tool: the folder, and its template where the folder has another."""
        name = template if template in FAMILIES else "qwen3"
        if not (self.folder / name).exists():
            write_model(self.folder / name, name)
        if template in FAMILIES:
            return ["--model", name]
        (self.folder / "own.jinja").write_text(OWN_TEMPLATES.get(template, template))
        return ["--model", name, "--chat-template", "own.jinja"]

    def run_on(self, template, *words, ok=True):
        return run_tool(self, "tokenize.py", self.folder, *self.model_of(template), "--out", "out", "--chat", *words, ok=ok)

    def write_lines(self, values, name="talks.jsonl"):
        (self.folder / name).write_text("".join(json.dumps(value) + "\n" for value in values))
        return name

    def files(self, template, name):
        self.run_on(template, name)
        return {ending: (self.folder / f"out.{ending}").read_bytes() for ending in ENDINGS}

    def refused(self, template, values, *says, name="talks.jsonl"):
        if name.endswith(".jsonl"):
            self.write_lines(values, name)
        else:
            (self.folder / name).write_text(json.dumps(values))
        said = self.run_on(template, name, ok=False)
        for text in says:
            self.assertIn(text, said)
        self.assertEqual(list(self.folder.glob("out*")), [])

    def test_every_form_gives_the_files_of_messages_of_text(self):
        for template in TEMPLATES:
            talks = [drawn_talk(self.draw, template) for _ in range(10)]
            expected = self.files(template, self.write_lines(talks))
            self.assertIn(1, expected["mask.bin"])
            for form, make in FORMS.items():
                with self.subTest(template, form=form):
                    values = [make(self.draw, copy.deepcopy(talk)) for talk in talks]
                    self.assertEqual(self.files(template, self.write_lines(values)), expected)
            mixed = [self.draw.choice([*FORMS.values()])(self.draw, copy.deepcopy(talk)) for talk in talks]
            with self.subTest(template, form="a list"):
                (self.folder / "talks.json").write_text(json.dumps(mixed, indent=self.draw.choice([None, 2])))
                self.assertEqual(self.files(template, "talks.json"), expected)
            with self.subTest(template, form="lines in a *.json"):
                self.assertEqual(self.files(template, self.write_lines(mixed, "talks.json")), expected)
            for name, content in (("talks.json", json.dumps(mixed)), (self.write_lines(mixed), None)):
                with self.subTest(template, form="the mark that Windows writes", name=name):
                    file = self.folder / name
                    file.write_bytes(b"\xef\xbb\xbf" +
                                     self.draw.choice([b"", b"\r\n"]) + (content.encode() if content else file.read_bytes()))
                    self.assertEqual(self.files(template, name), expected)

    def test_calls_of_tools_keep_their_labels_in_parts(self):
        for template in ("qwen3", "gpt_oss"):
            talks = [drawn_talk(self.draw, template, tools=True) for _ in range(6)]
            expected = self.files(template, self.write_lines(talks))
            self.assertEqual(self.files(template, self.write_lines([with_parts(self.draw, talk) for talk in talks])),
                             expected)

    def test_a_template_that_writes_parts_alone_gives_what_one_of_text_gives(self):
        name = self.write_lines([drawn_talk(self.draw, "parts") for _ in range(10)])
        self.assertEqual(self.files(PARTS_TEMPLATE, name), self.files(STRINGS_TEMPLATE, name))

    def test_the_completion_alone_is_trained_on(self):
        for template in TEMPLATES:
            talks = [drawn_talk(self.draw, template) for _ in range(8)]
            expected = self.files(template, self.write_lines(talks))
            pairs = [{"prompt": with_parts(self.draw, talk[:-1], 0.3), "completion": talk[-1:]} for talk in talks]
            with self.subTest(template):
                found = self.files(template, self.write_lines(pairs))
                self.assertEqual([found[ending] for ending in ("bin", "docs.bin")],
                                 [expected[ending] for ending in ("bin", "docs.bin")])
                self.assertEqual(found["mask.bin"], self.last_answers(expected))
            pairs = [{"prompt": talk[-2]["content"], "completion": talk[-1]["content"]} for talk in talks]
            with self.subTest(template, form="texts"):
                self.assertEqual(self.files(template, self.write_lines(pairs)),
                                 self.files(template, self.write_lines([talk[-2:] for talk in talks])))

    def last_answers(self, files):
        """The mask, of each document its last run of labels alone."""
        mask, begin = bytearray(files["mask.bin"]), 0
        for at in range(0, len(files["docs.bin"]), 8):
            end = int.from_bytes(files["docs.bin"][at:at + 8], "little")
            last = mask.rindex(1, begin, end)
            first = mask.rfind(0, begin, last) + 1
            mask[begin:first] = bytes(first - begin)
            begin = end
        return bytes(mask)

    def without_labels(self, files, learnt):
        """The mask without its runs of labels that are not learnt."""
        mask, runs = bytearray(files["mask.bin"]), iter(learnt)
        begin = mask.find(1)
        while begin >= 0:
            end = mask.find(0, begin)
            if not next(runs):
                mask[begin:end] = bytes(end - begin)
            begin = mask.find(1, end)
        self.assertIsNone(next(runs, None))
        return bytes(mask)

    def test_answers_that_are_not_trained_on_are_read(self):
        for template in TEMPLATES:
            talks, learnt = [drawn_talk(self.draw, template) for _ in range(8)], []
            expected = self.files(template, self.write_lines(talks))
            for talk in talks:
                answers = [m for m in talk if m["role"] == "assistant"]
                on = self.draw.choice(answers)
                for message in answers:
                    learnt.append(message is on or self.draw.random() < 0.4)
                    message |= self.draw.choice(SWITCHES_ON if learnt[-1] else SWITCHES_OFF)
            for form in ("object", "sharegpt"):
                values = [FORMS[form](self.draw, talk) for talk in talks]
                if form == "sharegpt":
                    for value, talk in zip(values, talks):
                        for inner, message in zip(value["conversations"], talk):
                            inner |= {key: message[key] for key in ("weight", "train", "loss") if key in message}
                with self.subTest(template, form=form):
                    found = self.files(template, self.write_lines(values))
                    self.assertEqual(found["bin"], expected["bin"])
                    self.assertEqual(found["mask.bin"], self.without_labels(expected, learnt))

    def test_keys_that_would_be_lost_are_refused_by_conversation_message_and_key(self):
        for _ in range(80):
            template = self.draw.choice(TEMPLATES)
            talks = [drawn_talk(self.draw, template) for _ in range(self.draw.randint(1, 4))]
            talk = self.draw.randrange(len(talks))
            message = self.draw.randrange(len(talks[talk]))
            said = talks[talk][message]
            lost = [*LOST_KEYS]
            if template not in WRITE_THOUGHTS or said["role"] != "assistant":
                lost += [{name: thought} for name in THOUGHTS for thought in ("One.", in_parts(self.draw, "One."))]
                lost += [{"tool_calls": [WEATHER]}] * 3
            key, value = next(iter(self.draw.choice(lost).items()))
            said[key] = value
            where, form = f"message {message + 1}", self.draw.choice(["messages", "from", "prompt", "list", "system"])
            if form == "from":
                talks[talk] = [{**m, "role": None, "from": m["role"]} for m in talks[talk]]
            elif form == "prompt":
                where = "completion: message 1" if said is talks[talk][-1] else f"prompt: {where}"
                talks[talk] = {"prompt": talks[talk][:-1], "completion": talks[talk][-1:]}
            elif form == "system" and template not in ("gemma", "marked") and talks[talk][0]["role"] != "system":
                talks[talk] = {"system_prompt": "Be brief.", "messages": talks[talk]}
            with self.subTest(template, form=form, key=key, role=said["role"]):
                if form == "list":
                    self.refused(template, talks, f"talks.json: conversation {talk + 1}: {where}: found {key}",
                                 name="talks.json")
                else:
                    self.refused(template, talks, f"talks.jsonl:{talk + 1}: {where}: found {key}")

    def test_what_some_template_writes_is_taken(self):
        thoughts = [(template, more) for template in WRITE_THOUGHTS for more in
                    ({"reasoning_content": "One."}, {"thinking": "One."}, {"reasoning": in_parts(self.draw, "One.")},
                     dict.fromkeys(THOUGHTS, "One."), {"tool_calls": [WEATHER], "content": ""})]
        for template, more in (*thoughts, (PLAIN_TEMPLATE.replace("{{ m.content }}", "{{ m.refusal }}{{ m.content }}{{ m.notes }}"),
                                           {"refusal": "No.", "notes": ["a"]})):
            talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", **more}]
            with self.subTest(template, more=more):
                longer = talk + drawn_talk(self.draw, "gemma")
                self.assertIn(1, self.files(template, self.write_lines([talk, longer]))["mask.bin"])
        talk[1] = {"role": "assistant", "content": "b", "thinking": "c", "reasoning": "d"}
        for template in WRITE_THOUGHTS:
            (self.folder / "talks.jsonl").write_text(json.dumps(talk) + "\n")
            self.assertIn("talks.jsonl:1: message 2: found reasoning, ", self.run_on(template, "talks.jsonl", ok=False))

    def test_what_an_answer_says_with_its_calls_is_not_lost(self):
        template = PLAIN_TEMPLATE.replace("{{ m.content }}", "{% if m.tool_calls %}{{ m.tool_calls[0].function.name }}"
                                          "{% else %}{{ m.content }}{% endif %}")
        talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "I look.", "tool_calls": [WEATHER]}]
        self.refused(template, [talk], "talks.jsonl:1: the chat template writes nothing of what the assistant says in "
                                       "message 2 of 2")

    def test_rows_are_taken_in_every_form(self):
        talks = [drawn_talk(self.draw, "qwen3") for _ in range(8)]
        calls = [{"type": "function", "function": {"name": "look", "description": "Looks."}}]
        for more in ({}, {"tools": [calls] * 8}, {"tools": [json.dumps(calls)] * 8}):
            tools = calls if more else None
            expected = self.files("qwen3", self.write_lines([{"messages": talk, "tools": tools} for talk in talks]))
            for column, values in (("messages", [with_parts(self.draw, talk) for talk in talks]),
                                   ("conversations", [as_sharegpt(self.draw, talk)["conversations"] for talk in talks]),
                                   ("talk", talks)):
                pyarrow.parquet.write_table(pyarrow.table({"n": [1] * 8, column: values, **more}),
                                            self.folder / "talks.parquet")
                words = ["--field", "talk"] if column == "talk" else []
                self.run_on("qwen3", *words, "talks.parquet")
                for ending in ENDINGS:
                    self.assertEqual((self.folder / f"out.{ending}").read_bytes(), expected[ending], (column, more))
        expected = self.files("qwen3", self.write_lines([talk[-2:] for talk in talks]))
        pyarrow.parquet.write_table(pyarrow.table({"prompt": [talk[-2]["content"] for talk in talks],
                                                   "completion": [talk[-1]["content"] for talk in talks]}),
                                    self.folder / "talks.parquet")
        self.assertEqual(self.files("qwen3", "talks.parquet"), expected)

    def test_a_folder_has_lists_and_lines(self):
        talks = [drawn_talk(self.draw, "llama3") for _ in range(4)]
        expected = self.files("llama3", self.write_lines(talks))
        (self.folder / "data").mkdir()
        (self.folder / "data/a.json").write_text(json.dumps(talks[:2]))
        self.write_lines(talks[2:3], "data/b.jsonl")
        (self.folder / "data/c.json").write_text(json.dumps(talks[3], indent=1))  # one conversation
        for ending in ("bin", "json"):  # of an earlier call
            (self.folder / f"out.{ending}").rename(self.folder / f"data/out.{ending}")
        self.assertEqual(self.files("llama3", "data"), expected)

    def test_what_is_no_text_is_refused_by_conversation_message_and_part(self):
        for _ in range(60):
            template = self.draw.choice(TEMPLATES)
            talks = [with_parts(self.draw, drawn_talk(self.draw, template)) for _ in range(self.draw.randint(1, 5))]
            talk = self.draw.randrange(len(talks))
            message = self.draw.randrange(len(talks[talk]))
            content = talks[talk][message]["content"]
            part = self.draw.randint(0, len(content))
            content.insert(part, self.draw.choice(OTHER_PARTS))
            where = f"message {message + 1}, part {part + 1}: found "
            form = self.draw.choice(["messages", "sharegpt", "prompt", "list"])
            if form == "sharegpt":
                talks[talk] = as_sharegpt(self.draw, talks[talk])
            elif form == "prompt":
                last = message == len(talks[talk]) - 1
                where = f"completion: message 1, part {part + 1}: found " if last else f"prompt: {where}"
                talks[talk] = {"prompt": talks[talk][:-1], "completion": talks[talk][-1:]}
            with self.subTest(template, form=form, part=content[part]):
                if form == "list":
                    self.refused(template, talks, f"talks.json: conversation {talk + 1}: {where}", name="talks.json")
                else:
                    self.refused(template, talks, f"talks.jsonl:{talk + 1}: {where}")

    def test_what_has_no_content_or_another_speaker_is_refused(self):
        user, said = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
        for value, says in (
                ([user, {"role": "assistant", "text": "b"}], "message 2: found the keys role, text, expected content"),
                ([{"role": "user", "content": None}, said], "message 1: found the keys role, expected content"),
                ([{"from": "human", "content": "a", "value": None}, {"from": "gpt"}], "message 2: found the keys role"),
                ([{"role": "user", "content": {"text": "a"}}, said], 'message 1: found {"text": "a"}, expected text'),
                ([{"role": "user", "content": 7}, said], "message 1: found 7, expected text"),
                ([user, {**said, "reasoning_content": [{"type": "image"}]}], 'message 2, part 1: found the type "image"'),
                ([user, {"from": "function_call", "value": "{}"}], 'message 2: found from "function_call", expected one of'),
                ([user, "b"], 'message 2: found "b", expected {"role", "content"}'),
                ({"messages": [user, said], "images": ["a.png"]}, "found images next to the messages"),
                ({"conversations": [user, said], "image": "a.png"}, "found image next to the messages"),
                ({"messages": [user, said], "tools": {"a": 1}}, "tools: found"),
                ({"messages": [user, said], "tools": "["}, "tools: found no JSON"),
                ({"messages": [{"role": "system", "content": "a"}, user, said], "system": "b"}, "found a system next to"),
                ({"prompt": "a"}, "found the keys prompt, expected a list of"),
                ({"prompt": [user, said], "completion": [user]}, "found no message of the assistant"),
                ({"data": [[user, said]]}, "found the keys data, expected a list of"),
                ({"messages": [user, said], "documents": ["a"]}, "found documents next to the messages"),
                ({"messages": [user, said], "system": "a", "system_prompt": "b"}, "found system and system_prompt that say"),
                ({"messages": [{"role": "system", "content": "a"}, user, said], "system_prompt": "b"},
                 "found a system_prompt next to"),
                ({"messages": [user, said], "conversations": [user, user, said]}, "found messages and conversations that say"),
                ({"messages": [user, said], "prompt": "c"}, "found messages and prompt that say"),
                ({"messages": [user, said], "prompt": "a", "completion": "c"}, "found messages and completion that say"),
                ({"conversations": [user, said], "completion": [said, user, {**said, "content": "c"}]},
                 "found conversations and completion that say"),
                ([{**user, "value": "c"}, said], "message 1: found content and value that say"),
                ([{**user, "from": "gpt"}, said], 'message 1: found role "user" and from "gpt"'),
                ([user, {**said, "weight": 0}], "found no message of the assistant that its weight lets learn"),
                (None, "found null, expected a list of"),
                (7, "found 7, expected a list of")):
            with self.subTest(value=value):
                self.refused("llama3", [[user, said], value], f"talks.jsonl:2: {says}")
        self.refused("llama3", {"data": [[user, said]]}, "talks.json: found the keys data", name="talks.json")
        for name in ("talks.json", "talks.jsonl"):
            for text, says in (("7" * 5000, "found no JSON (a number has more digits than can be read)"),
                               ("[" * 100_000, "found no JSON (its lists and objects are nested too deeply)"),
                               ("1" + "0" * 99, "found 1000000")):
                (self.folder / name).write_text(text + "\n")
                self.assertIn(says, self.run_on("llama3", name, ok=False))
        (self.folder / "talks.json").write_text("[[")
        self.assertIn("talks.json: found no JSON", self.run_on("llama3", "talks.json", ok=False))

    def test_what_the_template_would_leave_out_is_refused(self):
        # Qwen3 knows no developer; gpt-oss takes a system message only in front; a role may be
        # custom.
        user, said = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
        for template, role, says in (("qwen3", "developer", "the developer says in message 3 of 5"),
                                     ("gpt_oss", "system", "the system says in message 3 of 5"),
                                     ("qwen3", "critic", "the critic says in message 3 of 5")):
            talk = [user, said, {"role": role, "content": "Be brief."}, user, said]
            self.refused(template, [talk], f"talks.jsonl:1: the chat template writes nothing of what {says}")
        talk[2]["role"] = "user"
        self.assertIn(1, self.files("qwen3", self.write_lines([talk]))["mask.bin"])


if __name__ == "__main__":
    unittest.main(verbosity=1)
