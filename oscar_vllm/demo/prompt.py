"""A long prompt whose answer stands near its beginning, and behind the BF16 sink: only the 2-bit history has it."""

from typing import Any

FACT = "The name of the farmer's dog is Biscuit."
QUESTION = "What is the name of the farmer's dog? Answer with the name only."
ANSWER = "Biscuit"
_OPENING = (
    "This is a long story about a village by the river, told by an old man who had lived there all his life. He began "
    "with the hills and the weather, as he always did, and with the road that leads from the bridge to the church, "
    "and with the names of the fields on both sides of it, one after the other."
)
_STORY = (
    "The morning was quiet in the village. Children walked along the river to school, and the baker opened his shop.",
    "In the afternoon the wind turned and it began to rain over the hills. Farmers brought their sheep home and closed "
    "the gates.",
    "The teacher lit the stove and read to the children about ships and far countries until the bell rang at four.",
    "At the mill the wheel had stopped, because a branch lay across the stream, and two men worked all day to free it.",
    "On market day the square was full of carts, and people came from the other side of the mountain to sell cheese.",
    "In winter the road was closed for weeks, and letters arrived all at once when the snow had melted.",
    "The old clock on the tower was always ten minutes late, and nobody in the village wanted it to be repaired.",
)


def long_prompt(tokenizer: Any, paragraphs: int = 70) -> list[int]:
    """Token ids of the chat prompt (about 2,000 tokens with SmolLM2's tokenizer)."""
    content = "\n".join([_OPENING, FACT, *(_STORY[i % len(_STORY)] for i in range(paragraphs)), "", QUESTION])
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": content}], add_generation_prompt=True, return_dict=False
    )
    return list(ids)
