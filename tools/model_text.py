"""What a model's folder says of text: its tokenizer, what begins and ends a text, its chat template.

Read by tokenize.py and chat.py, which load it by its path: this folder is not on their sys.path, where
tokenize.py would stand in for the standard module of its name.
"""

import importlib
import json
import pathlib
import re
import sys

# How published tokenizers call the end of a whole text; the tokens that end a turn have other names.
ENDS_OF_TEXT = ("<|endoftext|>", "<|end_of_text|>", "<eos>", "</s>", "<\uff5cend\u2581of\u2581sentence\uff5c>",
                "<|eos|>", "<|end_of_sentence|>")


def fail(message, code=2):
    """One line, and the exit code of what is refused; 1 is for what went wrong on the way."""
    print(f"{pathlib.Path(sys.argv[0]).stem}: {' '.join(str(message).split())}", file=sys.stderr)
    raise SystemExit(code)


def read_text(path):
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        fail(f"{path}: found bytes that are not UTF-8 ({error})")


def read_json(path):
    if not path.is_file():
        return {}
    try:
        found = json.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        fail(f"{path}: found no JSON ({error})")
    return found if isinstance(found, dict) else fail(f"{path}: found no JSON object")


def needed(module, purpose):
    """The module, or one line that says how to get its package."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.split(".")[0]
        bootstrap = ""  # an installed copy has none
        if (pathlib.Path(__file__).resolve().parents[1] / "scripts/bootstrap").is_file():
            bootstrap = f", or scripts/bootstrap --with-tools and then .venv/bin/python {sys.argv[0]}"
        fail(f"found no package {package} for {sys.executable} ({error}), expected it {purpose}; install it: "
             f"{sys.executable} -m pip install {package}{bootstrap}")


class Tokenizer:
    """tokenizer.json of a folder, or that file itself, with what the folder says of its special tokens."""

    def __init__(self, model):
        library = needed("tokenizers", "to read tokenizer.json")
        self.model = model
        source = model / "tokenizer.json" if model.is_dir() else model
        if not source.is_file():
            fail(f"{source} is not there")
        try:
            self.library = library.Tokenizer.from_file(str(source))
        except Exception as error:  # the library has no class of its own
            fail(f"{source}: found no tokenizer ({error})")
        self.about = read_json(model / "tokenizer_config.json")

    def plain(self, text):
        """Ids of the text alone."""
        return self.library.encode(text, add_special_tokens=False).ids

    def size(self):
        """Ids may have gaps: the largest counts, not how many there are."""
        return max(self.library.get_vocab(with_added_tokens=True).values()) + 1

    def shown(self, ids):
        return ", ".join(f"{id} {self.library.id_to_token(id)!a}" for id in ids) or "none"

    def word_of(self, key):
        word = self.about.get(key)
        word = word.get("content") if isinstance(word, dict) else word
        return word if isinstance(word, str) else None

    def named(self, word):
        found = self.library.token_to_id(word)
        return fail(f"the tokenizer has no token {word!r}") if found is None else found

    def configured(self, key):
        """The one id that config.json gives, or None. A list is of ends of turns, too."""
        path = self.model / "config.json"
        found = read_json(path).get(key)
        if isinstance(found, list):
            found = found[0] if len(found) == 1 else None
        if found is None or isinstance(found, bool) or not isinstance(found, int):
            return None
        return found if 0 <= found < 1 << 32 else fail(f"{path}: found {key} {found}, expected a token id")

    def around(self):
        """What the tokenizer itself puts before and after a text: tokenizer.json alone says so, in
        transformers too (add_bos_token of tokenizer_config.json is for folders without it)."""
        if self.library.num_special_tokens_to_add(False) == 0:
            return [], []
        whole, ids = self.library.encode("a").ids, self.plain("a")
        for at in range(len(whole) - len(ids) + 1 if ids else 0):
            if whole[at:at + len(ids)] == ids:
                return whole[:at], whole[at + len(ids):]
        return fail("cannot tell what this tokenizer puts around a text: between its special tokens it encodes "
                    "the letter a otherwise")

    def known_beginning(self):
        """The ids that begin a text where one has a beginning, or []."""
        ids = self.around()[0]
        if ids:
            return ids
        word = self.word_of("bos_token")
        found = self.configured("bos_token_id") if word is None else self.named(word)
        return [] if found is None else [found]

    def beginning(self, choice):
        """(ids before a text, who says so). `choice` is auto, yes or no."""
        if choice == "no":
            return [], "--bos no"
        ids = self.around()[0]
        if choice == "auto" or ids:
            return ids, "as the tokenizer itself adds it" if ids else "the tokenizer itself adds none"
        ids = self.known_beginning()
        if not ids:
            fail(f"--bos yes: found no bos_token in {self.model / 'tokenizer_config.json'} and no bos_token_id in "
                 "config.json, expected one; give --bos no")
        return ids, "--bos yes"

    def end_of_text(self, word):
        """(id of the token that ends a document, who says so); `word` names it where it is not None."""
        if word is not None:
            return self.named(word), "--eos"
        eos = self.word_of("eos_token")
        if eos not in ENDS_OF_TEXT:
            # Chat models call the end of a turn their eos_token, next to the end of a text.
            for name in ENDS_OF_TEXT:
                found = self.library.token_to_id(name)
                if found is not None:
                    return found, "the tokenizer's end of text"
        if eos is not None:
            return self.named(eos), "eos_token of tokenizer_config.json"
        found = self.configured("eos_token_id")
        if found is None:
            fail(f"found no end of text in the tokenizer, no eos_token in {self.model / 'tokenizer_config.json'} "
                 "and no eos_token_id in config.json that is a single id; name one by --eos or give --no-eos")
        return found, "eos_token_id of config.json"


def common_prefix(a, b):
    """How many characters two texts begin with in common."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if a[:middle] == b[:middle] else (low, middle - 1)
    return low


def common_suffix(a, b):
    return common_prefix(a[::-1], b[::-1])


def other_word(text):
    """A character that the text does not have."""
    return next(c for c in map(chr, range(0x2460, 0x10000)) if c not in text)


def other_words(message, word):
    """The message, saying `word`: in the place of its content, and of the arguments of its tools."""
    changed = dict(message)
    calls = message.get("tool_calls")
    if message.get("content") or not calls:
        changed["content"] = word
    if calls:
        changed["tool_calls"] = []
        for call in calls:
            call = json.loads(json.dumps(call))
            inner = call.get("function", call)
            inner["arguments"] = word if isinstance(inner.get("arguments"), str) else {word: word}
            changed["tool_calls"].append(call)
    return changed


class Chat:
    """Conversations as ids, with the tokens that the assistant says."""

    REWRITTEN = ("the chat template rewrites earlier turns, so that nothing says which text is the "
            "assistant's; give one with {% generation %} marks by --chat-template")

    def __init__(self, tokenizer, template=None, purpose="for --chat"):
        transformers = needed("transformers", purpose)
        self.tokenizer = tokenizer
        try:
            self.renderer = transformers.AutoTokenizer.from_pretrained(tokenizer.model, local_files_only=True)
        except Exception as error:  # of any class the folder's tokenizer is
            fail(f"{tokenizer.model}: transformers finds no tokenizer there ({error})")
        if template is not None:
            self.renderer.chat_template = read_text(template)
            if not self.renderer.chat_template.strip():
                fail(f"{template}: found an empty file, expected a chat template")
        if not self.renderer.chat_template:
            fail(f"{tokenizer.model}: found no chat template in tokenizer_config.json or chat_template.jinja; "
                 "give one by --chat-template")
        self.marked = re.search(r"{%-?\s*generation\s*-?%}", str(self.renderer.chat_template))
        self.in_parts = not self.writes(in_parts=False) and self.writes(in_parts=True)

    def writes(self, in_parts):
        """Whether the template writes contents in this form: those of models that see may know parts alone, and
        write nothing of a text."""
        self.in_parts = in_parts
        user = {"role": "user", "content": "a"}
        try:
            said = {self.render([user, {"role": "assistant", "content": word}]) for word in ("bb", "cc")}
        except Exception:  # a template is a program: it may raise anything
            return False
        return len(said) == 2

    def shaped(self, messages):
        """The messages, whose contents are text, as the template takes them."""
        if not self.in_parts:
            return messages
        return [{**message, "content": [{"type": "text", "text": message["content"]}]} if "content" in message
                else message for message in messages]

    def render(self, messages, begin_answer=False, tools=None):
        return self.renderer.apply_chat_template(self.shaped(messages), tools=tools, tokenize=False,
                                                 add_generation_prompt=begin_answer)

    def require_written(self, messages, text, tools=None, places=None, keys=()):
        """All that is said to the assistant stands in the text, and something of each of `keys`, (message, key):
        a template may drop a role, a turn or a key silently. Each text gets a word of its own, which has to
        appear; where any other value is taken out, the text has to be another. An earlier answer is looked at
        as the last turn, too: templates leave out what was thought before."""
        word = "q"
        while word in text:
            word += "q"
        said = [(n, "content") for n, message in enumerate(messages)
                if message["role"] != "assistant" and "content" in message]
        # Two keys that say the same have one word: transformers hands a thought on under several names.
        own = {(n, key == "content", messages[n][key]): f"{word}{at}x" for at, (n, key) in enumerate([*said, *keys])
               if isinstance(messages[n][key], str)}
        words = {(n, key): own[n, key == "content", messages[n][key]] for n, key in [*said, *keys]
                 if isinstance(messages[n][key], str)}
        marked = self.render(self.with_words(messages, words), tools=tools)
        for n, key in [*said, *keys]:
            mark = words.get((n, key))
            if not (mark and mark in marked) and not self.writes_key(messages, n, key, words, tools):
                self.refuse_unwritten(messages[n], key, n, places or [f"message {i + 1}" for i in range(len(messages))])

    def with_words(self, messages, words):
        return [{key: value + words[n, key] if (n, key) in words else value for key, value in message.items()}
                for n, message in enumerate(messages)]

    def writes_key(self, messages, n, key, words, tools):
        """Whether the template writes of this key, whose word is not in the whole text or which has none."""
        mark, answer = words.get((n, key)), messages[n]["role"] == "assistant"
        if mark and not answer:
            return False
        turns = messages[:n + 1] if answer else messages
        before = self.render(turns, tools=tools)
        other = self.with_words(turns, words) if mark else [*turns]
        if not mark:
            other[n] = {"content": "", **{name: value for name, value in turns[n].items() if name != key}}
        try:
            after = self.render(other, tools=tools)
        except Exception:  # the template reads it: it is a program that may raise anything where it misses something
            return not mark
        return mark in after if mark else after != before

    def refuse_unwritten(self, message, key, n, places):
        if key != "content":
            raise ValueError(f"{places[n]}: found {key}, of which the chat template writes nothing, expected all of it in "
                             "the text; leave it out, give it the name that the template knows, or another template by "
                             "--chat-template")
        among = sum(place.startswith("message") for place in places)
        place = f"{places[n]} of {among}" if places[n].startswith("message") else places[n]
        raise ValueError(f"the chat template writes nothing of what the {message['role']} says in {place}, expected all of "
                         "it in the text; leave that message out, give it another role, or another template by "
                         "--chat-template")

    def answers(self, messages, text, tools=None, unlearnt=()):
        """[begin, end) in the text of what the assistant says, of each answer that is not `unlearnt`.

        An answer is what the template writes behind its prompt where the answer is the last turn.
        Where the whole text begins so, that is it, without the white space between turns. Where the
        template writes that turn otherwise in the whole text, it is what is left of it there."""
        for i, message in enumerate(messages):
            if message["role"] != "assistant" or i in unlearnt:
                continue
            if i == 0:
                raise ValueError("found an answer first, expected what it answers before it; or give a "
                                 "template with {% generation %} marks by --chat-template")
            after = self.render(messages[:i + 1], tools=tools)
            begin, prompt = self.beginning(messages, i, after, tools)
            if text.startswith(after):
                yield begin, begin + len(after[begin:].rstrip())
            else:
                yield self.left(messages, i, text, after, begin, prompt, tools)

    def beginning(self, messages, i, after, tools):
        """(where answer i begins in `after`, which ends with it; the prompt that the template ends with
        where it asks for that answer)."""
        asked = self.render(messages[:i], tools=tools)
        before = self.render(messages[:i], begin_answer=True, tools=tools)
        prompt = before[len(asked):] if before.startswith(asked) else ""
        if after.startswith(before):
            return len(before), prompt
        # With an answer behind them the template writes even the turns before it otherwise.
        bare = self.render([*messages[:i], {"role": "assistant", "content": other_word(after)}], tools=tools)
        if not prompt:
            raise ValueError(self.REWRITTEN)
        return self.behind(prompt, after, common_prefix(after, bare)), prompt

    def behind(self, prompt, text, end):
        """Where the last prompt before `end` ends in the text."""
        at = text.rfind(prompt, 0, end)
        if at < 0:
            raise ValueError(self.REWRITTEN)
        return at + len(prompt)

    def left(self, messages, i, text, after, begin, prompt, tools):
        """[begin, end) in `text` of what is there of answer i, which ends `after` from `begin`. Where
        its words stand is what changes with them."""
        other = other_words(messages[i], other_word(text + after))
        changed = self.render([*messages[:i], other, *messages[i + 1:]], tools=tools)
        alone = self.render([*messages[:i], other], tools=tools)
        if changed == text:
            raise ValueError(self.REWRITTEN)
        first = common_prefix(text, changed)
        last = max(first, len(text) - common_suffix(text, changed))
        said = max(common_prefix(after, alone), len(after) - common_suffix(after, alone))
        begin = max(self.behind(prompt, text, first), last - common_suffix(text[:last], after[begin:said]))
        if begin > first:
            raise ValueError(self.REWRITTEN)
        tail = after[said:].rstrip()  # the end of the turn, which may be another than of a last one
        return begin, last + len(tail) if text.startswith(tail, last) else last

    def leave_out(self, unlearnt, messages, text, ids, mask, tools):
        """Nothing between two learnt answers is a label where an unlearnt one stands there."""
        encoded = self.tokenizer.library.encode(text, add_special_tokens=False)
        if encoded.ids != list(ids):
            raise ValueError("cannot tell which tokens are those of an answer that is not trained on: the tokenizer "
                             "encodes the text of the chat template otherwise alone; leave that answer out")
        learnt = [i for i, message in enumerate(messages) if message["role"] == "assistant" and i not in unlearnt]
        for first, last in zip([-1, *learnt], [*learnt, len(messages)]):
            between = [i for i in range(first + 1, last) if i in unlearnt]
            if not between:
                continue
            begin = 0 if first < 0 else self.length_before(messages[:between[0]], text, tools)
            end = len(text) if last == len(messages) else self.length_before(messages[:last], text, tools)
            for i, (at, _) in enumerate(encoded.offsets):
                mask[i] &= not begin <= at < end

    def length_before(self, messages, text, tools):
        """How much of the text these messages are, which begin it."""
        before = self.render(messages, tools=tools)
        if not text.startswith(before):
            raise ValueError("cannot tell where an answer begins or ends that is not trained on: the chat template writes "
                             "the messages before it otherwise alone; leave that answer out")
        return len(before)

    def encode(self, conversation):
        """(ids, a byte for each: 1 where the assistant says it in an answer that is trained on)."""
        messages, tools, places, unlearnt, keys = conversation
        text = self.render(messages, tools=tools)
        self.require_written(messages, text, tools, places, keys)
        if self.marked:
            out = self.renderer.apply_chat_template(self.shaped(messages), tools=tools, tokenize=True, return_dict=True,
                                                    return_assistant_tokens_mask=True)
            ids, mask = out["input_ids"], bytearray(out["assistant_masks"])
            if unlearnt:
                self.leave_out(unlearnt, messages, text, ids, mask, tools)
        else:
            encoded = self.tokenizer.library.encode(text, add_special_tokens=False)
            ids, mask = encoded.ids, bytearray(len(encoded.ids))
            for begin, end in self.answers(messages, text, tools, unlearnt):
                for i, (at, _) in enumerate(encoded.offsets):
                    mask[i] |= begin <= at < end
        if not any(mask):
            raise ValueError("found nothing in the text of the template that the assistant says, expected some: "
                             "nothing to train on")
        return ids, mask
