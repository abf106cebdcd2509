#!/usr/bin/env python3
"""Chats with a model: text in, text out, through the model's chat template and `tessera generate`.

    .venv/bin/python tools/chat.py MODEL [--system TEXT] [--temperature T] [--top-k K] [--top-p P] ...

MODEL is a Hugging Face folder with a tokenizer and a chat template, or the folder of a run or one of its
checkpoints, which takes both from `model.path` of the run (or --tokenizer DIR). Each line of standard
input is what the user says; an empty line, or its end, ends the chat. Answers come word by word, and the
whole conversation is the prompt of the next one. What a template calls thinking is shown in the answer
and handed on as the template wants it.

Without --temperature the model's generation_config.json says whether and how to draw (do_sample,
temperature, top_k, top_p); where it says nothing, the most likely token is taken. Each answer loads the
model again.

Needs the packages `tokenizers` and `transformers`; scripts/bootstrap --with-tools installs both.
"""

import sys

del sys.path[0]  # this folder: tokenize.py would stand in for the standard module of its name
import argparse  # noqa: E402
import importlib.util  # noqa: E402
import pathlib  # noqa: E402
import subprocess  # noqa: E402
import tomllib  # noqa: E402

ROOT = pathlib.Path(__file__).resolve().parents[1]
other = importlib.util.spec_from_file_location("model_text", ROOT / "tools/model_text.py")
model_text = importlib.util.module_from_spec(other)
other.loader.exec_module(model_text)
fail = model_text.fail

# The program of a working copy, or of the installed copy whose share/tessera this is.
PROGRAM = ROOT / "build/release/tessera" if (ROOT / "CMakeLists.txt").is_file() else ROOT.parents[1] / "lib/tessera/tessera"
# How gpt-oss writes the parts of an answer; its template takes them apart.
FINAL, CHANNEL, MESSAGE, END = "<|channel|>final<|message|>", "<|channel|>", "<|message|>", "<|end|>"


def folder_of_text(model):
    """Where the tokenizer of MODEL is: there, or where its run began."""
    if (model / "tokenizer.json").is_file() or not model.is_dir():
        return model
    for folder in (model, *model.resolve().parents[:3]):
        config = folder / "config.toml"
        if not config.is_file():
            continue
        try:
            path = tomllib.loads(model_text.read_text(config)).get("model", {}).get("path")
        except tomllib.TOMLDecodeError as error:
            fail(f"{config}: found no TOML ({error})")
        if path:
            return pathlib.Path(path)
    return fail(f"{model}: found no tokenizer.json and no run's config.toml with model.path, expected one; name the "
                "folder of the tokenizer by --tokenizer")


def how_to_draw(arguments, model):
    """Options of `tessera generate`."""
    says = model_text.read_json(model / "generation_config.json")
    drawn = says.get("do_sample") is True and says.get("temperature") != 0
    options = {name: getattr(arguments, name) for name in ("temperature", "top_k", "top_p", "seed")}
    if options["temperature"] is None:
        asked = options["top_k"] is not None or options["top_p"] is not None
        options["temperature"] = 1.0 if drawn or asked else 0.0
        if drawn:
            known = {name: says[name] for name in ("temperature", "top_k", "top_p") if says.get(name)}
            options |= {name: value for name, value in known.items() if getattr(arguments, name) is None}
    return [word for name, value in options.items() if value is not None
            for word in (f"--{name.replace('_', '-')}", str(value))]


def numbers(stream):
    """The ids of a line, each as soon as it is whole."""
    word = ""
    while letter := stream.read(1):
        if letter.isdigit():
            word += letter
        elif word:
            yield int(word)
            word = ""
    if word:
        yield int(word)


class Model:
    """MODEL behind `tessera generate`, with the tokenizer and the template that belong to it."""

    def __init__(self, arguments):
        folder = arguments.tokenizer or folder_of_text(arguments.model)
        self.tokenizer = model_text.Tokenizer(folder)
        self.chat = model_text.Chat(self.tokenizer, arguments.chat_template, "for the chat template")
        self.command = [str(arguments.program), "generate", "--model", str(arguments.model), "--max-new-tokens",
                        str(arguments.max_new_tokens), *how_to_draw(arguments, folder)]
        self.stops = self.ends_of_turns() | self.ends_of_texts(folder)

    def ends_of_turns(self):
        """The token that the template puts behind an answer: the program need not know it."""
        user = {"role": "user", "content": "a"}
        said = [self.chat.render([user, {"role": "assistant", "content": word}]) for word in "bc"]
        tail = said[0][len(said[0]) - model_text.common_suffix(*said):].strip()
        ids = self.tokenizer.plain(tail)[:1]
        return set(ids) if self.tokenizer.library.decode(ids, skip_special_tokens=True) == "" else set()

    def ends_of_texts(self, folder):
        """Where the program ends by itself."""
        found = []
        for name in ("config.json", "generation_config.json"):
            ids = model_text.read_json(folder / name).get("eos_token_id")
            found += ids if isinstance(ids, list) else [ids]
        return {id for id in found if isinstance(id, int)}

    def answer(self, messages, show):
        """What the assistant says next; show(text) gets it in parts."""
        text = self.chat.render(messages, begin_answer=True)
        self.chat.require_written(messages, text)
        prompt = self.tokenizer.plain(text)
        command = [*self.command, "--prompt-tokens", ",".join(map(str, prompt))]
        ids, shown, stopped = [], "", False
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as program:
            for id in numbers(program.stdout):
                if id in self.stops:
                    stopped = True
                    program.terminate()
                    break
                ids.append(id)
                text = self.tokenizer.library.decode(ids, skip_special_tokens=False)
                if not text.endswith("\ufffd"):  # part of a character
                    show(text[len(shown):])
                    shown = text
            errors = program.stderr.read().strip()
        if program.returncode and not stopped:
            fail(errors.splitlines()[-1].removeprefix("tessera: ") if errors else
                 f"{self.command[0]} ended with {program.returncode}")
        text = self.tokenizer.library.decode(ids, skip_special_tokens=False)
        show(text[len(shown):])
        return text


def message_of(text):
    """An answer as a template takes it: that of gpt-oss wants its parts one by one."""
    if CHANNEL not in text:
        return {"role": "assistant", "content": text}
    thinking, _, final = text.partition(FINAL)
    plain = [part.rpartition(MESSAGE)[2].partition(END)[0] for part in (thinking, final)]
    return {"role": "assistant", "content": plain[1], "thinking": plain[0]}


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.error = lambda message: fail(f"{message}; see --help")
    parser.add_argument("model", type=pathlib.Path, metavar="MODEL")
    parser.add_argument("--tokenizer", type=pathlib.Path, metavar="DIR")
    parser.add_argument("--chat-template", type=pathlib.Path, metavar="FILE")
    parser.add_argument("--system", metavar="TEXT", help="what the system says first")
    parser.add_argument("--max-new-tokens", type=int, default=512, metavar="N", help="of an answer; default 512")
    parser.add_argument("--temperature", type=float, metavar="T", help="0: the most likely token")
    parser.add_argument("--top-k", type=int, metavar="K")
    parser.add_argument("--top-p", type=float, metavar="P")
    parser.add_argument("--seed", type=int)
    parser.add_argument("--program", type=pathlib.Path, default=PROGRAM, help="default that of this copy")
    arguments = parser.parse_args()
    if not arguments.program.is_file():
        fail(f"--program: {arguments.program} is not there; build it, or name one")
    return arguments


def show(text):
    print(text, end="", flush=True)


def talk(arguments):
    model = Model(arguments)
    messages = [{"role": "system", "content": arguments.system}] if arguments.system else []
    while True:
        if sys.stdin.isatty():
            show("> ")
        try:
            line = sys.stdin.buffer.readline().decode("utf-8").rstrip("\r\n")
        except UnicodeDecodeError as error:
            fail(f"standard input: found bytes that are not UTF-8 ({error})")
        if not line:
            return
        messages.append({"role": "user", "content": line})
        messages.append(message_of(model.answer(messages, show)))
        print()


def main():
    try:
        talk(parse_arguments())
    except KeyboardInterrupt:
        print()
    except OSError as error:
        fail(f"{error.filename}: {error.strerror}" if error.filename else error)
    except UnicodeError as error:
        fail(f"found text that is not of the expected encoding ({error})")
    except Exception as error:  # a template is a program: it may raise anything
        fail(f"the chat template: {error}")


if __name__ == "__main__":
    main()
