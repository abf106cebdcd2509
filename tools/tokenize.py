#!/usr/bin/env python3
"""Turns text into a token file that `tessera train` reads as data.path: NAME.bin next to NAME.json.

    .venv/bin/python tools/tokenize.py --model DIR --out NAME TEXT...
    .venv/bin/python tools/tokenize.py --model DIR --out NAME --chat MESSAGES.jsonl...
    .venv/bin/python tools/tokenize.py --model DIR --encode TEXT
    .venv/bin/python tools/tokenize.py --model DIR --decode 1,2,3

TEXT are files, or folders of such: *.jsonl and *.parquet, where each line or row is one document in its
field `text` (--field names another), and any other file (of a folder: *.txt), which is one document;
@LIST takes them from a file, one a line. DIR is a Hugging Face folder with tokenizer.json (or that file
itself). Files are read in parts: memory does not grow with them.

After each document comes the end-of-text token: the tokenizer's own (<|endoftext|>, <|end_of_text|>,
<eos>, </s>, ...), else `eos_token` of tokenizer_config.json, else `eos_token_id` of config.json, unless
--eos names another or --no-eos leaves it out. Before each document comes what the tokenizer itself puts
before a text (--bos auto), or its beginning of text in any case (yes), or nothing (no). What was chosen
is printed.

With --chat each line of MESSAGES.jsonl, element of a list in a *.json (read whole), or row of *.parquet is
one conversation: a list of {"role", "content"}, or an object that holds it as "messages" (or as --field
names it); as "conversations", in which {"from", "value"} is a message, too; or "prompt" and "completion",
each a text (of the user, of the assistant) or such a list, of which the completion alone is trained on.
"tools" and "system" (or "system_prompt") may stand next to it. A content may be a list of parts, {"type": "text",
"text"}, which are joined; other parts are refused, and so is what the template would leave out: of what is
said, or of another key of a message (images, say). The folder's chat template (or --chat-template FILE)
makes text of it. An answer with "weight" 0, or with "train" or "loss" false, is no label. NAME.mask.bin has
1 for what the assistant says, its end of turn included, 0 for all else: only those tokens are trained on. What
it says is what the template writes of an answer that is the last turn; what the template leaves out once
there are later turns (as Qwen3's thinking) is not there, and what it writes in another way is no label.
With --bos auto a conversation begins as the template has it.

NAME.docs.bin has the ends of documents: positions of tokens, uint64, each the one behind the document's
last. NAME.labels.bin, next to a mask, has uint64, too: the number of tokens, then the unmasked targets up to
the end of each 4096 tokens.

--encode prints the ids that `tessera generate --prompt-tokens` takes, with the special tokens that the
tokenizer puts around a text; --decode makes text of the ids that it prints ("-": standard input).

Needs the package `tokenizers`, for --chat also `transformers`, for *.parquet also `pyarrow`;
scripts/bootstrap --with-tools installs all.
"""

import sys

del sys.path[0]  # this folder: the file would stand in for the standard module of its name
import argparse  # noqa: E402
import array  # noqa: E402
import codecs  # noqa: E402
import contextlib  # noqa: E402
import errno  # noqa: E402
import importlib.util  # noqa: E402
import json  # noqa: E402
import os  # noqa: E402
import pathlib  # noqa: E402
import re  # noqa: E402
import signal  # noqa: E402


def neighbour(name):
    """A module of this folder."""
    spec = importlib.util.spec_from_file_location(name, pathlib.Path(__file__).with_name(f"{name}.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


model_text, conversation = neighbour("model_text"), neighbour("conversation")
fail, needed = model_text.fail, model_text.needed

# Characters of a document that are encoded at once, and how many before them are encoded again, so
# that the tokens after a cut are those of the whole: no tokenizer looks further back than this.
WINDOW, CONTEXT = 1 << 22, 1 << 12
LABEL_BLOCK = 4096  # tokens that one number of NAME.labels.bin is about
ROWS = 256  # of a parquet file that are read at once


class Parser(argparse.ArgumentParser):
    def error(self, message):
        fail(f"{message}; see --help")


def describes_tokens(file):
    """NAME.json next to the NAME.bin that an earlier call may have written into a folder of talks."""
    return file.suffix == ".json" and file.with_suffix(".bin").exists()


def files_of(paths, endings):
    for path in paths:
        files = [path]
        if path.is_dir():
            files = sorted(file for file in path.iterdir() if file.suffix in endings and not describes_tokens(file))
        if not files:
            fail(f"{path}: found no *{', *'.join(endings)} in this folder")
        yield from files


def lines_of(path):
    """(place, value) of each line of JSON."""
    with open(path, "rb") as lines:
        for number, line in enumerate(lines, 1):
            if number == 1:  # Windows begins a file with a mark
                line = line.removeprefix(codecs.BOM_UTF8)
            if not line.strip():
                continue
            place = f"{path}:{number}"
            try:
                yield place, conversation.json_of(line.decode("utf-8"))
            except UnicodeDecodeError as error:
                fail(f"{place}: found bytes that are not UTF-8 ({error})")
            except ValueError as error:
                fail(f"{place}: found no JSON ({error})")


def listed_in(path):
    """(place, value) of each element of a list in JSON; some *.json have lines as a *.jsonl, or one value."""
    with open(path, "rb") as file:
        content = file.read()
    try:
        found = conversation.json_of(content.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        fail(f"{path}: found bytes that are not UTF-8 ({error})")
    except json.JSONDecodeError as error:
        if error.msg != "Extra data":
            fail(f"{path}: found no JSON ({error})")
        yield from lines_of(path)
        return
    except ValueError as error:
        fail(f"{path}: found no JSON ({error})")
    if not isinstance(found, list) or any(is_message(element) for element in found):
        yield f"{path}", found  # one conversation
        return
    for number, value in enumerate(found, 1):
        yield f"{path}: conversation {number}", value


def is_message(found):
    """A record of a data set may say who made it as "from", next to its conversation."""
    return (isinstance(found, dict) and ("role" in found or "from" in found)
            and not any(form in found for form in conversation.FORMS))


def without_nulls(value):
    """Rows of a table have all keys of their column, those that no row gave as null."""
    if isinstance(value, dict):
        return {key: without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [without_nulls(inner) for inner in value] if isinstance(value, list) else value


def rows_of(path, fields, more=()):
    """(place, {field: value}) of each row of a parquet file, which has one of `fields`; of `more` what is there."""
    parquet = needed("pyarrow.parquet", "to read *.parquet")
    with open(path, "rb"):
        pass  # what is not there is said as of any file
    number = 0
    try:
        with parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            if not any(field in names for field in fields):
                fail(f"{path}: found the columns {', '.join(names)}, expected one of the name {' or '.join(fields)}; "
                     "name it by --field")
            columns = [name for name in names if name in fields or name in more]
            for batch in file.iter_batches(batch_size=ROWS, columns=columns):
                for row in batch.to_pylist():
                    number += 1
                    yield f"{path}: row {number}", without_nulls(row)
    except (OSError, ValueError, RuntimeError) as error:  # the library's own are kinds of these
        fail(f"{path}: found no whole parquet file ({error}); the file is torn or is another kind: fetch it again")


def require_text(place, text):
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        fail(f"{place}: found half of a surrogate pair ({error.object[error.start]!a}), expected text")


def texts_of(path, field):
    """(place, text) of each line or row."""
    for place, found in rows_of(path, [field]) if path.suffix == ".parquet" else lines_of(path):
        text = found.get(field) if isinstance(found, dict) else found
        if not isinstance(text, str):
            fail(f"{place}: found no text in the field {field}, expected some; name the field by --field, or give "
                 "conversations with --chat")
        require_text(place, text)
        yield place, text


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
    """(place, lists of (ids, mask or None)) of every document."""
    for path in files_of(arguments.text, (".txt", ".jsonl", ".parquet")):
        if path.suffix in (".jsonl", ".parquet"):
            for place, text in texts_of(path, arguments.field or "text"):
                yield place, [(tokenizer.plain(text), None)]
            continue
        with open(path, encoding="utf-8", newline="") as stream:
            parts = encode_text(tokenizer.library, stream, arguments.window, arguments.context)
            yield path, ((ids, None) for ids in parts)


def conversations_of(path, field):
    """(place, what is found) of each conversation."""
    if path.suffix == ".parquet":
        return rows_of(path, [field] if field else conversation.FORMS, conversation.FIELDS)
    return listed_in(path) if path.suffix == ".json" else lines_of(path)


def encode_conversations(arguments, tokenizer):
    chat = model_text.Chat(tokenizer, arguments.chat_template)
    for path in files_of(arguments.text, (".json", ".jsonl", ".parquet")):
        for place, found in conversations_of(path, arguments.field):
            try:
                require_text(place, json.dumps(found, ensure_ascii=False, default=str))
                ids, mask = chat.encode(conversation.read(found, arguments.field))
            except Exception as error:  # a template is a program: it may raise anything
                fail(f"{place}: {error}")
            yield place, [(ids, mask)]


@contextlib.contextmanager
def writing(file):
    """A disk that is full says not of which file."""
    try:
        yield file
    except OSError as error:
        fail(f"{file.name}: {error.strerror or error}", 1)


def say(text, is_result=False):
    """A line on standard output. Where its reader has closed, the program continues silently; where it cannot be
    written, a result is lost, and a line about files that are written is not."""
    try:
        if sys.stdout is None:
            raise OSError(errno.EBADF, "it is closed")
        print(text, flush=True)
    except OSError as error:
        if sys.stdout is not None:  # it is flushed once more at the end
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if is_result and not isinstance(error, BrokenPipeError):
            fail(f"standard output: {error.strerror}", 1)


class TokenFile:
    """NAME.bin, NAME.json and what lies next to it, under their names only when all are complete."""

    PARTS = ("bin", "mask.bin", "labels.bin", "docs.bin", "json")

    def __init__(self, name, vocabulary, with_mask):
        self.base = name.parent / name.name.removesuffix(".bin")
        self.base.parent.mkdir(parents=True, exist_ok=True)
        self.vocabulary, self.count, self.documents, self.ended, self.kept = vocabulary, 0, 0, 0, 0
        self.dtype, self.code = ("uint16", "H") if vocabulary <= 1 << 16 else ("uint32", "I")
        self.with_mask, self.labels, self.parts = with_mask, [], {}
        self.endings = [ending for ending in self.PARTS if with_mask or ending not in ("mask.bin", "labels.bin")]

    def __enter__(self):
        try:  # a signal may come between two files
            for ending in self.endings:
                self.parts[ending] = open(f"{self.base}.{ending}.tmp", "wb")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        for part in self.parts.values():
            with contextlib.suppress(OSError):  # what it could not write has been said
                part.close()
        for ending in self.endings:  # they are there where finish() was not reached
            pathlib.Path(f"{self.base}.{ending}.tmp").unlink(missing_ok=True)

    def put(self, ending, content):
        with writing(self.parts[ending]) as part:
            part.write(content)

    def write(self, ending, code, numbers):
        numbers = array.array(code, numbers)
        if sys.byteorder == "big":
            numbers.byteswap()
        self.put(ending, numbers)

    def add(self, ids, mask):
        self.write("bin", self.code, ids)
        if self.with_mask:
            self.put("mask.bin", mask)
            self.count_labels(mask)
        self.count += len(ids)

    def count_labels(self, mask):
        at = 0
        while at < len(mask):
            end = min(len(mask), at + LABEL_BLOCK - (self.count + at) % LABEL_BLOCK)
            self.kept += end - at - mask.count(0, at, end)
            at = end
            if (self.count + at) % LABEL_BLOCK == 0:
                self.labels.append(self.kept)

    def end_document(self):
        self.documents += 1
        if self.count > self.ended:  # of an empty one there is nothing to keep apart
            self.write("docs.bin", "Q", [self.count])
            self.ended = self.count

    def finish(self):
        if self.with_mask:
            if self.count % LABEL_BLOCK:
                self.labels.append(self.kept)
            self.write("labels.bin", "Q", [self.count, *self.labels])
        about = {"dtype": self.dtype, "num_tokens": self.count, "vocab_size": self.vocabulary}
        self.put("json", (json.dumps(about) + "\n").encode())
        for part in self.parts.values():
            with writing(part):
                part.close()
        for ending in self.PARTS:
            pathlib.Path(f"{self.base}.{ending}").unlink(missing_ok=True)  # of an earlier file
            if ending in self.parts:
                os.replace(f"{self.base}.{ending}.tmp", f"{self.base}.{ending}")
        say(f"{self.base}.bin: {self.count} tokens of {self.dtype}, vocabulary {self.vocabulary}, "
            f"{self.documents} documents" + (f", {self.kept} labels" if self.with_mask else ""))


class Borders:
    """What stands before and after each document."""

    def __init__(self, arguments, tokenizer):
        self.before, why = tokenizer.beginning(arguments.bos)
        self.chat, self.bos = arguments.chat, arguments.bos
        if self.chat and arguments.bos == "auto":
            begins = "as the chat template writes it"
        else:
            begins = f"{tokenizer.shown(self.before)} ({why})"
        # A template may have written it already.
        self.known = tokenizer.known_beginning() if self.chat else []
        self.end, ends = None, "none (--no-eos)"
        if not arguments.no_eos:
            self.end, why = tokenizer.end_of_text(arguments.eos)
            ends = f"{tokenizer.shown([self.end])} ({why})"
        self.chosen = f"beginning of a document: {begins}; end of a document: {ends}"

    def around(self, parts):
        """The lists of (ids, mask) of a document, with its borders."""
        last = None
        if not self.chat and self.before:
            yield self.before, None
        for ids, mask in parts:
            if self.chat and self.bos != "auto":
                ids, mask = self.begun(ids, mask)
            yield ids, mask
            last = ids[-1] if ids else last
        if self.end is not None and not (self.chat and last == self.end):
            yield [self.end], b"\0"

    def begun(self, ids, mask):
        there = len(self.known) if self.known and list(ids[:len(self.known)]) == self.known else 0
        return self.before + list(ids[there:]), bytes(len(self.before)) + bytes(mask[there:])


def write_tokens(arguments, tokenizer):
    borders = Borders(arguments, tokenizer)
    vocabulary = max(tokenizer.size() - 1, -1 if borders.end is None else borders.end, *borders.before) + 1
    with TokenFile(arguments.out, vocabulary, arguments.chat) as out:
        add_documents(arguments, tokenizer, borders, out)
        out.finish()
    say(borders.chosen)


def add_documents(arguments, tokenizer, borders, out):
    encode = encode_conversations if arguments.chat else encode_documents
    for place, parts in encode(arguments, tokenizer):
        before = out.count
        try:
            for ids, mask in borders.around(parts):
                out.add(ids, mask)
        except UnicodeDecodeError as error:
            fail(f"{place}: found bytes that are not UTF-8 ({error})")
        out.end_document()
        if isinstance(place, pathlib.Path):
            print(f"{place}: {out.count - before} tokens", file=sys.stderr)
    if out.documents == 0:
        fail("found no document, expected some: a conversation or a text in each line or row")


def encode(tokenizer, text, bos):
    try:
        text.encode("utf-8")  # what the shell hands over need not be
    except UnicodeEncodeError:
        fail(f"--encode: found {text!a}, expected UTF-8")
    before, why = tokenizer.beginning(bos)
    print(f"beginning of text: {tokenizer.shown(before)} ({why})", file=sys.stderr)
    return ",".join(map(str, [*before, *tokenizer.plain(text), *tokenizer.around()[1]]))


def decode(tokenizer, text):
    ids = []
    for word in text.split(","):
        if not re.fullmatch(r"[0-9]{1,10}", word.strip(), re.ASCII):
            fail(f"--decode: found {word.strip()[:40]!a}, expected token ids with commas between, as 1,2,3")
        ids.append(int(word))
        if ids[-1] >= 1 << 32 or tokenizer.library.id_to_token(ids[-1]) is None:
            fail(f"--decode: found the id {ids[-1]}, expected one of the tokenizer's "
                 f"{tokenizer.library.get_vocab_size()} tokens")
    return tokenizer.library.decode(ids, skip_special_tokens=False)


def parse_arguments():
    parser = Parser(description=__doc__, fromfile_prefix_chars="@",
                    formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=pathlib.Path, required=True)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--out", type=pathlib.Path, help="NAME, without .bin")
    parser.add_argument("--bos", choices=("auto", "yes", "no"), default="auto",
                        help="the token that begins a text: as the tokenizer itself adds it, always, never")
    end = parser.add_mutually_exclusive_group()
    end.add_argument("--eos", help="the token, as text, that ends a document")
    end.add_argument("--no-eos", action="store_true")
    parser.add_argument("--chat", action="store_true", help="conversations; writes NAME.mask.bin")
    parser.add_argument("--chat-template", type=pathlib.Path, metavar="FILE")
    parser.add_argument("--field", help="of lines and rows; default text, with --chat messages and the like")
    what.add_argument("--encode", metavar="TEXT", help="print its ids")
    what.add_argument("--decode", metavar="IDS", help="print their text")
    parser.add_argument("--window", type=int, default=WINDOW, help="characters encoded at once")
    parser.add_argument("--context", type=int, default=CONTEXT, help=argparse.SUPPRESS)
    parser.add_argument("text", type=pathlib.Path, nargs="*")
    arguments = parser.parse_args()
    if arguments.window < 1:
        fail(f"--window: found {arguments.window}, expected at least 1")
    return arguments


def run(arguments):
    tokenizer = model_text.Tokenizer(arguments.model)
    if arguments.encode is not None:
        say(encode(tokenizer, arguments.encode, arguments.bos), is_result=True)
    elif arguments.decode is not None:
        text = sys.stdin.read() if arguments.decode == "-" else arguments.decode
        say(decode(tokenizer, text), is_result=True)
    elif arguments.out is None or not arguments.text:
        fail("found no --out NAME with text, expected one; or --encode, --decode")
    else:
        write_tokens(arguments, tokenizer)


def main():
    sys.stderr = sys.stderr or open(os.devnull, "w")  # print would write to standard output where it is closed
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # as the shell has it, and tidied up
    try:
        run(parse_arguments())
    except OSError as error:
        fail(f"{error.filename}: {error.strerror}" if error.filename else error)
    except UnicodeError as error:  # of standard input, standard output or an @LIST
        fail(f"found text that is not of the expected encoding ({error})")


if __name__ == "__main__":
    main()
