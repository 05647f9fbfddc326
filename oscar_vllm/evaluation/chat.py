"""A question as the token ids that a model answers."""

from typing import Any


def question_ids(tokenizer: Any, question: str) -> list[int]:
    """The question in the model's chat template; of a model without one, the text itself."""
    if not has_chat_template(tokenizer):
        return list(tokenizer.encode(question))
    messages = [{"role": "user", "content": question}]
    return list(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False))


def has_chat_template(tokenizer: Any) -> bool:
    """Whether the model was made to answer chat messages."""
    return bool(getattr(tokenizer, "chat_template", None))
