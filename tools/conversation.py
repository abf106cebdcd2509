"""Reads a conversation in the forms that data sets have, as the messages that a chat template takes.

    [{"role": "user", "content": "..."}, ...]                   or {"messages": [...], "tools": [...]}
    {"conversations": [{"from": "human", "value": "..."}, ...]}  ShareGPT
    {"prompt": "..." or [...], "completion": "..." or [...]}     texts of user and assistant, or messages

A content is text, or a list of parts that are text alone ({"type": "text", "text": "..."}), which are
joined: published templates write such a list each in its own way, many as nothing or as Python's own
text of it. A `system` beside any form is what the system says first; `tools` are a list or its JSON.
All else is refused by message and part: a model is trained on text that the data do not have, or not on
what they have, where it is let through.

Read by tokenize.py, which loads it by its path (see model_text.py).
"""

import json
import typing

# The speakers in ShareGPT and in formats that follow it.
SPEAKERS = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "chatgpt": "assistant",
            "bot": "assistant", "model": "assistant", "system": "system", "developer": "developer", "tool": "tool",
            "observation": "tool", "function_response": "tool"}
FORMS = ("messages", "conversations", "prompt", "completion")
BESIDE = ("tools", "system")
# A data set for models that see or hear has these beside its texts.
OTHER_MEDIA = ("image", "images", "video", "videos", "audio", "audios")
FIELDS = (*FORMS, *BESIDE, *OTHER_MEDIA)
TEXTS = ("content", "reasoning_content", "thinking")  # of a message
EXPECTED = ('expected a list of {"role", "content"} or of {"from", "value"}, or an object that holds one as "messages" '
            'or "conversations", or "prompt" and "completion"')


class Conversation(typing.NamedTuple):
    messages: list
    tools: list | None
    first: int  # messages before this one are a prompt: the assistant's words there are no labels


def shown(value):
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else f"{text[:60]}..."


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


def message_of(found, where):
    """{"role", "content", ...} of a message in either spelling; null is nothing."""
    message = {key: value for key, value in found.items() if value is not None} if isinstance(found, dict) else {}
    if "role" not in message and "from" in message:
        speaker = message.pop("from")
        if not isinstance(speaker, str) or speaker not in SPEAKERS:
            raise ValueError(f"{where}: found from {shown(speaker)}, expected one of {', '.join(SPEAKERS)}; give what "
                             "is no text, as calls of tools, in messages with a role")
        message["role"] = speaker
        if "value" in message:
            message["content"] = message.pop("value")
    if not isinstance(message.get("role"), str):
        raise ValueError(f'{where}: found {shown(found)}, expected {{"role", "content"}} or {{"from", "value"}}')
    message["role"] = SPEAKERS.get(message["role"], message["role"])
    if "content" not in message and not message.get("tool_calls"):
        raise ValueError(f"{where}: found the keys {', '.join(message)}, expected content (or value, or tool_calls)")
    return {key: text_of(value, where) if key in TEXTS else value for key, value in message.items()}


def messages_of(found, where=""):
    if not isinstance(found, list) or not found:
        raise ValueError(f"{where}found {shown(found)}, {EXPECTED}")
    return [message_of(message, f"{where}message {number}") for number, message in enumerate(found, 1)]


def side_of(found, key, role):
    """The messages of a prompt or completion, which may be one text."""
    return [{"role": role, "content": found[key]}] if isinstance(found[key], str) else messages_of(found[key], f"{key}: ")


def with_system(messages, text):
    if not text:
        return messages
    if not isinstance(text, str):
        raise ValueError(f"system: found {shown(text)}, expected text")
    if any(message["role"] == "system" for message in messages):
        raise ValueError("found a system beside a message of the system, expected one of them")
    return [{"role": "system", "content": text}, *messages]


def tools_of(found):
    """Some data sets keep them as text."""
    if isinstance(found, str) and found.strip():
        try:
            found = json.loads(found)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"tools: found no JSON ({error})") from None
    if found and not isinstance(found, list):
        raise ValueError(f"tools: found {shown(found)}, expected a list")
    return found or None


def read(found, field=None):
    """The Conversation of a line or row, or ValueError; `field` names its messages where they have another name."""
    if isinstance(found, dict) and field is not None:
        inner = found.get(field)
        beside = {key: value for key, value in found.items() if key not in FORMS}
        found = {**beside, **(inner if isinstance(inner, dict) else {"messages": inner})}
    found = found if isinstance(found, dict) else {"messages": found}
    given = {key: value for key, value in found.items() if value is not None}
    for key in OTHER_MEDIA:
        if given.get(key):
            raise ValueError(f"found {key} beside the messages, expected text alone: nothing else is trained on; leave "
                             "the conversation out")
    if "messages" in given or "conversations" in given:
        prompt, said = [], messages_of(given.get("messages", given.get("conversations")))
    elif "prompt" in given and "completion" in given:
        prompt, said = side_of(given, "prompt", "user"), side_of(given, "completion", "assistant")
    else:
        raise ValueError(f"found {'the keys ' + ', '.join(given) if given else shown(found)}, {EXPECTED}")
    if not any(message["role"] == "assistant" for message in said):
        raise ValueError("found no message of the assistant, so nothing to train on")
    messages = with_system([*prompt, *said], given.get("system"))
    return Conversation(messages, tools_of(given.get("tools")), len(messages) - len(said))
