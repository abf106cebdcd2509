"""Reads a conversation in the forms that data sets have, as the messages that a chat template takes.

    [{"role": "user", "content": "..."}, ...]                   or {"messages": [...], "tools": [...]}
    {"conversations": [{"from": "human", "value": "..."}, ...]}  ShareGPT
    {"prompt": "..." or [...], "completion": "..." or [...]}     texts of user and assistant, or messages

A content is text, or a list of parts that are text alone ({"type": "text", "text": "..."}), which are
joined: published templates write such a list each in its own way, many as nothing or as Python's own
text of it. A `system` (or `system_prompt`) next to any form is what the system says first; `tools` are a
list or its JSON. An answer with `weight` 0, or with `train` or `loss` false, is read and not learnt.
All else is refused by message and by part or key: a model is trained on text that the data do not have,
or not on what they have, where it is let through. Keys of a message that are not known here are for the
template, which has to write something of each (model_text.py asks it).

Read by tokenize.py, which loads it by its path (see model_text.py).
"""

import json
import re
import typing

# The speakers in ShareGPT and in formats that follow it.
SPEAKERS = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "chatgpt": "assistant",
            "bot": "assistant", "model": "assistant", "system": "system", "developer": "developer", "tool": "tool",
            "observation": "tool", "function_response": "tool"}
FORMS = ("messages", "conversations", "prompt", "completion")
SYSTEMS = ("system", "system_prompt")
SHARES_CORES = ("tools", *SYSTEMS, "documents")
# A data set for models that see or hear has these next to its texts.
OTHER_MEDIA = ("image", "images", "video", "videos", "audio", "audios")
FIELDS = (*FORMS, *SHARES_CORES, *OTHER_MEDIA)
TEXTS = ("content", "reasoning_content", "reasoning", "thinking")  # of a message
# Of an answer, whether it is trained on: OpenAI, axolotl and ms-swift have one each.
SWITCHES = ("weight", "train", "loss")
# Keys that say something about a message and are no part of it: who made it, when, how good it is.
INERT = re.compile(
    r"(.*_)?(id|ids|idx|index|uid|uuid|identifier|hash|md5|sha256|ip|at|time|timestamp|date|count|tokens|length|score|"
    r"scores|rating|ratings|rank|reward|quality|votes|moderation|lang|language)|name|model|model_name|engine|provider|"
    r"source|origin|dataset|category|topic|tags|created|updated|country|state|header|toxic|toxicity|redacted|synthetic|"
    r"deleted|cost|usage|latency|metadata|meta|logprobs|finish_reason|stop_reason|end_turn|turn")
EXPECTED = ('expected a list of {"role", "content"} or of {"from", "value"}, or an object that holds one as "messages" '
            'or "conversations", or "prompt" and "completion"')


class Conversation(typing.NamedTuple):
    messages: list
    tools: list | None
    places: list  # of each message, as it is called in what is said of it
    unlearnt: set  # answers, by their position, whose words are no labels
    keys: list  # (position, key) of what a template has to write, next to what is said to the assistant


class Turn(typing.NamedTuple):
    message: dict
    place: str
    learnt: bool


def shown(value):
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else f"{text[:60]}..."


def json_of(text):
    """The value, or ValueError whose words are about the text."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        raise
    except ValueError:  # Python's own limit, and its advice to programmers
        raise ValueError("a number has more digits than can be read") from None
    except RecursionError:
        raise ValueError("its lists and objects are nested too deeply") from None


def text_of(value, where):
    """The text of a content, its parts joined."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise ValueError(f"{where}: found {shown(value)}, expected text, or a list of parts that are text")
    for number, part in enumerate(value, 1):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text" or not isinstance(part.get("text"), str):
            found = shown(part) if kind in (None, "text") else f"the type {shown(kind)}"
            raise ValueError(f'{where}, part {number}: found {found}, expected {{"type": "text", "text": "..."}}: text '
                             "alone is trained on; leave the conversation out, or write the part as text")
    return "".join(part["text"] for part in value)


def name_speaker(message, where):
    """Gives the message its role, of either spelling."""
    speaker = message.pop("from", None)
    if "role" not in message and speaker is not None:
        if not isinstance(speaker, str) or speaker not in SPEAKERS:
            raise ValueError(f"{where}: found from {shown(speaker)}, expected one of {', '.join(SPEAKERS)}; give what "
                             "is no text, as calls of tools, in messages with a role")
        message["role"] = speaker
    if not isinstance(message.get("role"), str):
        return False
    role = SPEAKERS.get(message["role"], message["role"])
    if speaker is not None and (not isinstance(speaker, str) or SPEAKERS.get(speaker, speaker) != role):
        raise ValueError(f"{where}: found role {shown(message['role'])} and from {shown(speaker)}, expected one of them, "
                         "or the same speaker; leave one out")
    message["role"] = role
    return True


def join_value(message, where):
    """Gives the message its content, of either spelling; an empty one is none."""
    value = message.pop("value", None)
    if not value:
        if value is not None:
            message.setdefault("content", value)
    elif message.get("content") and text_of(message["content"], where) != text_of(value, where):
        raise ValueError(f"{where}: found content and value that say different things, expected one of them; leave one "
                         "out")
    else:
        message["content"] = value


def is_learnt(message, where):
    """Takes the switches out of the message."""
    given = {key: message.pop(key) for key in SWITCHES if key in message}
    for key, value in given.items():
        if not isinstance(value, (bool, int, float)) or value not in (0, 1):
            raise ValueError(f"{where}: found {key} {shown(value)}, expected 0 or 1 (false or true): a message is trained "
                             "on or not")
    return all(given.values())


def turn_of(found, where):
    """The message {"role", "content", ...} of either spelling; null is nothing."""
    message = {key: value for key, value in found.items() if value is not None} if isinstance(found, dict) else {}
    if not name_speaker(message, where):
        raise ValueError(f'{where}: found {shown(found)}, expected {{"role", "content"}} or {{"from", "value"}}')
    join_value(message, where)
    for key in OTHER_MEDIA:
        if message.get(key):
            raise ValueError(f"{where}: found {key}, expected text alone: nothing else is trained on; leave the "
                             "conversation out")
    learnt = is_learnt(message, where)
    message = {key: value for key, value in message.items() if key == "content" or not is_empty(value)}
    if "content" not in message and not message.get("tool_calls"):
        raise ValueError(f"{where}: found the keys {', '.join(message)}, expected content (or value, or tool_calls)")
    message = {key: text_of(value, where) if key in TEXTS else value for key, value in message.items()}
    return Turn(message, where, learnt)


def is_empty(value):
    """What stands for nothing; an empty text is one, and a template may look whether it is there."""
    return value is False or value in ([], {})


def turns_of(found, where=""):
    if not isinstance(found, list) or not found:
        raise ValueError(f"{where}found {shown(found)}, {EXPECTED}")
    return [turn_of(message, f"{where}message {number}") for number, message in enumerate(found, 1)]


def side_of(found, key, role):
    """The turns of a prompt or completion, which may be one text."""
    if isinstance(found[key], str):
        return [Turn({"role": role, "content": found[key]}, key, True)]
    return turns_of(found[key], f"{key}: ")


def turns_in(given):
    """(what is read alone, what is trained on), of the form that is there. Data sets have a prompt next to the
    messages that begin with it, and two forms of one talk: they have to say the same."""
    lists = [key for key in ("messages", "conversations") if key in given]
    lists = [key for key in lists if given[key]] or lists[:1]
    if not lists:
        return side_of(given, "prompt", "user"), side_of(given, "completion", "assistant")
    said = turns_of(given[lists[0]])
    if len(lists) == 2:
        other = turns_of(given[lists[1]], f"{lists[1]}: ")
        if [(turn.message, turn.learnt) for turn in other] != [(turn.message, turn.learnt) for turn in said]:
            refuse_two(*lists)
    texts = {turn.message.get("content", "").strip() for turn in said}
    for key in ("prompt", "completion"):
        if given.get(key) and any(turn.message.get("content", "").strip() not in texts
                                  for turn in side_of(given, key, "user")):
            refuse_two(lists[0], key)
    return [], said


def refuse_two(one, other):
    raise ValueError(f"found {one} and {other} that say different things, expected one of them; leave one out, or name "
                     "the one that counts by --field")


def with_system(turns, given):
    texts = {key: given[key] for key in SYSTEMS if given.get(key)}
    for key, text in texts.items():
        if not isinstance(text, str):
            raise ValueError(f"{key}: found {shown(text)}, expected text")
        if text != texts.get("system", text):
            raise ValueError("found system and system_prompt that say different things, expected one of them; leave one "
                             "out")
        if any(turn.message["role"] == "system" for turn in turns):
            raise ValueError(f"found a {key} next to a message of the system, expected one of them")
    return [*(Turn({"role": "system", "content": text}, key, True) for key, text in [*texts.items()][:1]), *turns]


def tools_of(found):
    """Some data sets keep them as text."""
    if isinstance(found, str) and found.strip():
        try:
            found = json_of(found)
        except ValueError as error:
            raise ValueError(f"tools: found no JSON ({error})") from None
    if found and not isinstance(found, list):
        raise ValueError(f"tools: found {shown(found)}, expected a list")
    return found or None


def read(found, field=None):
    """The Conversation of a line or row, or ValueError; `field` names its messages where they have another name."""
    if isinstance(found, dict) and field is not None:
        inner = found.get(field)
        other = {key: value for key, value in found.items() if key not in FORMS}
        found = {**other, **(inner if isinstance(inner, dict) else {"messages": inner})}
    whole = found
    found = found if isinstance(found, dict) else {"messages": found}
    given = {key: value for key, value in found.items() if value is not None}
    for key in OTHER_MEDIA:
        if given.get(key):
            raise ValueError(f"found {key} next to the messages, expected text alone: nothing else is trained on; leave "
                             "the conversation out")
    if given.get("documents"):
        raise ValueError("found documents next to the messages, expected all text in the messages: a template is given "
                         "nothing else; write them into a message")
    if not ("messages" in given or "conversations" in given or ("prompt" in given and "completion" in given)):
        raise ValueError(f"found {'the keys ' + ', '.join(given) if given else shown(whole)}, {EXPECTED}")
    prompt, said = turns_in(given)
    answers = [turn for turn in said if turn.message["role"] == "assistant"]
    if not any(turn.learnt for turn in answers):
        raise ValueError(f"found no message of the assistant{' that its weight lets learn' if answers else ''}, so "
                         "nothing to train on")
    turns = with_system([*(turn._replace(learnt=False) for turn in prompt), *said], given)
    return Conversation([turn.message for turn in turns], tools_of(given.get("tools")), [turn.place for turn in turns],
                        {n for n, turn in enumerate(turns) if turn.message["role"] == "assistant" and not turn.learnt},
                        [(n, key) for n, turn in enumerate(turns) for key in keys_of(turn.message)])


def keys_of(message):
    """What a template has to write something of, next to what is said to the assistant."""
    known = ("role",) if message["role"] == "assistant" else ("role", "content")
    return [key for key, value in message.items() if value and key not in known and not INERT.fullmatch(key)]
