#!/usr/bin/env python3
"""Turns text into a token file that `tessera train` reads as data.path: NAME.bin beside NAME.json.

    .venv/bin/python tools/tokenize.py --model DIR --out NAME TEXT...
    .venv/bin/python tools/tokenize.py --model DIR --out NAME --chat MESSAGES.jsonl...
    .venv/bin/python tools/tokenize.py --model DIR --encode TEXT
    .venv/bin/python tools/tokenize.py --model DIR --decode 1,2,3

TEXT are files or folders of *.txt, each file one document; @LIST takes them from a file, one a line.
DIR is a Hugging Face folder with tokenizer.json (or that file itself). After each document comes the
end-of-text token: `eos_token_id` of the folder's config.json, else `eos_token` of its
tokenizer_config.json, unless --eos names another or --no-eos leaves it out. Files are read in parts:
memory does not grow with them.

With --chat each line of MESSAGES.jsonl is one conversation, a list of {"role", "content"} or an object
that holds it as "messages". The folder's chat template (or --chat-template FILE) makes text of it, and
NAME.mask.bin has 1 for what the assistant says, its end of turn included, 0 for all else: only those
tokens are trained on.

--encode prints the ids that `tessera generate --prompt-tokens` takes, with the special tokens that the
tokenizer puts around a text; --decode makes text of the ids that it prints ("-": standard input).

Needs the package `tokenizers`, for --chat also `transformers`; scripts/bootstrap --with-tests installs
both.
"""

import sys

del sys.path[0]  # this folder: the file would stand in for the standard module of its name
import argparse  # noqa: E402
import array  # noqa: E402
import importlib  # noqa: E402
import json  # noqa: E402
import os  # noqa: E402
import pathlib  # noqa: E402
import re  # noqa: E402

# Characters of a document that are encoded at once, and how many before them are encoded again, so
# that the tokens after a cut are those of the whole: no tokenizer looks further back than this.
WINDOW, CONTEXT = 1 << 22, 1 << 12


def fail(message):
    """One line, and the exit code of what is refused."""
    print(f"tokenize: {' '.join(str(message).split())}", file=sys.stderr)
    raise SystemExit(2)


class Parser(argparse.ArgumentParser):
    def error(self, message):
        fail(f"{message}; see --help")


def read_text(path):
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        fail(f"{path}: found bytes that are not UTF-8 ({error})")


def files_of(paths, ending):
    for path in paths:
        files = sorted(path.glob(f"*{ending}")) if path.is_dir() else [path]
        if not files:
            fail(f"{path}: found no *{ending} in this folder")
        yield from files


def read_json(path):
    if not path.is_file():
        return {}
    try:
        found = json.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        fail(f"{path}: found no JSON ({error})")
    return found if isinstance(found, dict) else fail(f"{path}: found no JSON object")


def needed(package, purpose):
    """The package, or one line that says how to get it."""
    try:
        return importlib.import_module(package)
    except ImportError as error:
        fail(f"found no package {package} for {sys.executable} ({error}), expected it {purpose}; install it: "
             f"{sys.executable} -m pip install {package}, or scripts/bootstrap --with-tests and then "
             ".venv/bin/python tools/tokenize.py")


def open_tokenizer(model):
    Tokenizer = needed("tokenizers", "to read tokenizer.json").Tokenizer
    source = model / "tokenizer.json" if model.is_dir() else model
    if not source.is_file():
        fail(f"{source} is not there")
    try:
        return Tokenizer.from_file(str(source))
    except Exception as error:  # the library has no class of its own
        fail(f"{source}: found no tokenizer ({error})")


def end_of_text(arguments, tokenizer):
    """The id to put after a document, or None."""
    if arguments.no_eos:
        return None
    word = arguments.eos
    if word is None:
        found = read_json(arguments.model / "config.json").get("eos_token_id")
        found = found[0] if isinstance(found, list) and found else found
        if isinstance(found, int):
            if not 0 <= found < 1 << 32:
                fail(f"{arguments.model / 'config.json'}: found eos_token_id {found}, expected a token id")
            return found
        word = read_json(arguments.model / "tokenizer_config.json").get("eos_token")
        word = word.get("content") if isinstance(word, dict) else word
    if not isinstance(word, str):
        fail(f"found no eos_token_id in {arguments.model / 'config.json'} and no eos_token in "
             "tokenizer_config.json; name one by --eos or give --no-eos")
    found = tokenizer.token_to_id(word)
    if found is None:
        fail(f"the tokenizer has no token {word!r}")
    return found


def encode_text(tokenizer, stream, window, context):
    """Lists of ids that together are those of the whole text, which is read in windows.

    A window is cut where one token ends and another begins, well before its end; the next one begins
    earlier, and has to come to a border between tokens at the same character."""
    text, done, at_end = "", 0, False
    while not at_end:
        part = stream.read(window)
        at_end = not part
        text += part
        encoded = tokenizer.encode(text, add_special_tokens=False)
        ids, spans = encoded.ids, encoded.offsets
        first = next((i for i, span in enumerate(spans) if span[0] >= done), len(ids))
        if first < len(ids) and done > 0 and (spans[first][0] != done or spans[first - 1][1] > done):
            fail(f"{stream.name}: this tokenizer cannot be cut here; try a larger --window")
        if at_end:
            yield ids[first:]
            return
        last = len(ids) - 1
        while last > first and (spans[last][0] > len(text) - context or spans[last - 1][1] > spans[last][0]):
            last -= 1
        if last <= first:
            continue  # no border yet: a longer window
        yield ids[first:last]
        keep = max(0, spans[last][0] - context)
        text, done = text[keep:], spans[last][0] - keep


def encode_documents(arguments, tokenizer):
    """(name, lists of (ids, mask or None)) of every document."""
    for path in files_of(arguments.text, ".txt"):
        with open(path, encoding="utf-8", newline="") as stream:
            yield path, ((ids, None) for ids in encode_text(tokenizer, stream, arguments.window, arguments.context))


class Chat:
    """Conversations as ids, with the tokens that the assistant says."""

    def __init__(self, model, template, tokenizer):
        transformers = needed("transformers", "for --chat")
        self.tokenizer = tokenizer
        try:
            self.renderer = transformers.AutoTokenizer.from_pretrained(model, local_files_only=True)
        except Exception as error:  # of whatever class the folder's tokenizer is
            fail(f"{model}: transformers finds no tokenizer there ({error})")
        if template is not None:
            self.renderer.chat_template = read_text(template)
        if not self.renderer.chat_template:
            fail(f"{model}: found no chat template in tokenizer_config.json or chat_template.jinja; "
                 "give one by --chat-template")
        self.marked = re.search(r"{%-?\s*generation\s*-?%}", str(self.renderer.chat_template))

    def render(self, messages, begin_answer=False):
        return self.renderer.apply_chat_template(messages, tokenize=False,
                                                 add_generation_prompt=begin_answer)

    def answers(self, messages, text):
        """[begin, end) in the text of what the assistant says: from where the template asks for an
        answer to where the text with that answer ends, without the white space between turns."""
        for i, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            if i == 0:
                raise ValueError("found an answer first, expected what it answers before it; or give a "
                                 "template with {% generation %} marks by --chat-template")
            before = self.render(messages[:i], begin_answer=True)
            after = self.render(messages[:i + 1])
            if not (after.startswith(before) and text.startswith(after)):
                raise ValueError("the chat template writes earlier turns anew, so that nothing says "
                                 "which text is the assistant's; give one with {% generation %} marks "
                                 "by --chat-template")
            yield len(before), len(before) + len(after[len(before):].rstrip())

    def encode(self, messages):
        if self.marked:
            out = self.renderer.apply_chat_template(messages, tokenize=True, return_dict=True,
                                                    return_assistant_tokens_mask=True)
            return out["input_ids"], bytes(out["assistant_masks"])
        text = self.render(messages)
        encoded = self.tokenizer.encode(text, add_special_tokens=False)
        mask = bytearray(len(encoded.ids))
        for begin, end in self.answers(messages, text):
            for i, (first, _) in enumerate(encoded.offsets):
                mask[i] |= begin <= first < end
        return encoded.ids, bytes(mask)


def conversation(line):
    """The messages of a line, or ValueError."""
    found = json.loads(line)
    try:
        json.dumps(found, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(f"found half of a surrogate pair ({error.object[error.start]!a}), expected text") from error
    messages = found.get("messages") if isinstance(found, dict) else found
    if not isinstance(messages, list) or not messages or not all(
            isinstance(m, dict) and isinstance(m.get("role"), str) for m in messages):
        raise ValueError('expected a list of {"role", "content"}, or {"messages": [...]}')
    if not any(m["role"] == "assistant" for m in messages):
        raise ValueError("found no message of the assistant, so nothing to train on")
    return messages


def encode_conversations(arguments, tokenizer):
    chat = Chat(arguments.model, arguments.chat_template, tokenizer)
    for path in files_of(arguments.text, ".jsonl"):
        with open(path, "rb") as lines:
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                try:
                    encoded = chat.encode(conversation(line.decode("utf-8")))
                except UnicodeDecodeError as error:
                    fail(f"{path}:{number}: found bytes that are not UTF-8 ({error})")
                except Exception as error:  # a template is a program: it may raise anything
                    fail(f"{path}:{number}: {error}")
                yield f"{path}:{number}", [encoded]


class TokenFile:
    """NAME.bin, NAME.json and perhaps NAME.mask.bin, under their names only when all are complete."""

    def __init__(self, name, vocabulary, with_mask):
        self.base = name.parent / name.name.removesuffix(".bin")
        self.base.parent.mkdir(parents=True, exist_ok=True)
        self.vocabulary, self.count = vocabulary, 0
        self.dtype, self.code = ("uint16", "H") if vocabulary <= 1 << 16 else ("uint32", "I")
        self.tokens = open(f"{self.base}.bin.tmp", "wb")
        self.mask = open(f"{self.base}.mask.bin.tmp", "wb") if with_mask else None

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for part in filter(None, (self.tokens, self.mask)):
            part.close()
            pathlib.Path(part.name).unlink(missing_ok=True)  # there where finish() was not reached

    def add(self, ids, mask):
        tokens = array.array(self.code, ids)
        if sys.byteorder == "big":
            tokens.byteswap()
        tokens.tofile(self.tokens)
        if self.mask:
            self.mask.write(mask)
        self.count += len(ids)

    def finish(self):
        pathlib.Path(f"{self.base}.mask.bin").unlink(missing_ok=True)  # of an earlier file
        for part, ending in ((self.tokens, "bin"), (self.mask, "mask.bin")):
            if part:
                part.close()
                os.replace(f"{self.base}.{ending}.tmp", f"{self.base}.{ending}")
        pathlib.Path(f"{self.base}.json").write_text(json.dumps(
            {"dtype": self.dtype, "num_tokens": self.count, "vocab_size": self.vocabulary}) + "\n")
        print(f"{self.base}.bin: {self.count} tokens of {self.dtype}, vocabulary {self.vocabulary}")


def write_tokens(arguments, tokenizer):
    eos = end_of_text(arguments, tokenizer)
    # Ids may have gaps: the largest counts, not how many there are.
    known = tokenizer.get_vocab(with_added_tokens=True).values()
    vocabulary = max([*known, -1 if eos is None else eos]) + 1
    with TokenFile(arguments.out, vocabulary, arguments.chat) as out:
        add_documents(arguments, tokenizer, eos, out)
        out.finish()


def add_documents(arguments, tokenizer, eos, out):
    encode = encode_conversations if arguments.chat else encode_documents
    documents = 0
    for name, parts in encode(arguments, tokenizer):
        last = None
        before = out.count
        try:
            for ids, mask in parts:
                out.add(ids, mask)
                last = ids[-1] if ids else last
        except UnicodeDecodeError as error:
            fail(f"{name}: found bytes that are not UTF-8 ({error})")
        # A template may have written it already.
        if eos is not None and not (arguments.chat and last == eos):
            out.add([eos], b"\0")
        documents += 1
        if not arguments.chat:
            print(f"{name}: {out.count - before} tokens", file=sys.stderr)
    if documents == 0:
        fail("found no conversation, expected one a line")
    print(f"{documents} documents", file=sys.stderr)


def encode(tokenizer, text):
    try:
        text.encode("utf-8")  # what the shell hands over need not be
    except UnicodeEncodeError:
        fail(f"--encode: found {text!a}, expected UTF-8")
    return ",".join(map(str, tokenizer.encode(text).ids))


def decode(tokenizer, text):
    ids = []
    for word in text.split(","):
        if not re.fullmatch(r"[0-9]{1,10}", word.strip(), re.ASCII):
            fail(f"--decode: found {word.strip()[:40]!a}, expected token ids with commas between, as 1,2,3")
        ids.append(int(word))
        if ids[-1] >= 1 << 32 or tokenizer.id_to_token(ids[-1]) is None:
            fail(f"--decode: found the id {ids[-1]}, expected one of the tokenizer's "
                 f"{tokenizer.get_vocab_size()} tokens")
    return tokenizer.decode(ids, skip_special_tokens=False)


def parse_arguments():
    parser = Parser(description=__doc__, fromfile_prefix_chars="@",
                    formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=pathlib.Path, required=True)
    parser.add_argument("--out", type=pathlib.Path, help="NAME, without .bin")
    parser.add_argument("--eos", help="the token, as text, that ends a document")
    parser.add_argument("--no-eos", action="store_true")
    parser.add_argument("--chat", action="store_true", help="conversations; writes NAME.mask.bin")
    parser.add_argument("--chat-template", type=pathlib.Path, metavar="FILE")
    parser.add_argument("--encode", metavar="TEXT", help="print its ids")
    parser.add_argument("--decode", metavar="IDS", help="print their text")
    parser.add_argument("--window", type=int, default=WINDOW, help="characters encoded at once")
    parser.add_argument("--context", type=int, default=CONTEXT, help=argparse.SUPPRESS)
    parser.add_argument("text", type=pathlib.Path, nargs="*")
    arguments = parser.parse_args()
    if arguments.window < 1:
        fail(f"--window: found {arguments.window}, expected at least 1")
    return arguments


def run(arguments):
    tokenizer = open_tokenizer(arguments.model)
    if arguments.encode is not None:
        print(encode(tokenizer, arguments.encode))
    elif arguments.decode is not None:
        print(decode(tokenizer, sys.stdin.read() if arguments.decode == "-" else arguments.decode))
    elif arguments.out is None or not arguments.text:
        fail("found no --out NAME with text, expected one; or --encode, --decode")
    else:
        write_tokens(arguments, tokenizer)


def main():
    try:
        run(parse_arguments())
    except OSError as error:
        fail(f"{error.filename}: {error.strerror}" if error.filename else error)
    except UnicodeError as error:  # of standard input, standard output or an @LIST
        fail(f"found text that is not of the expected encoding ({error})")


if __name__ == "__main__":
    main()
