"""A tokenizer without a model: one token for every word, blank run or sign."""

import re
from typing import Any


class WordTokenizer:
    """Encodes and decodes text; chat messages are marked with their role."""

    def __init__(self, chat: bool = True) -> None:
        self.words: list[str] = []
        self.ids: dict[str, int] = {}
        self.chat_template = "user: {content}\nassistant:" if chat else None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        del add_special_tokens
        ids = []
        for word in re.findall(r"\w+|\n| +|[^\w\n ]", text):
            if word not in self.ids:
                self.ids[word] = len(self.words)
                self.words.append(word)
            ids.append(self.ids[word])
        return ids

    def decode(self, ids: list[int]) -> str:
        return "".join(self.words[i] for i in ids)

    def apply_chat_template(self, messages: list[dict[str, str]], **_: Any) -> list[int]:
        assert self.chat_template is not None
        return self.encode(self.chat_template.format(content=messages[0]["content"]))
