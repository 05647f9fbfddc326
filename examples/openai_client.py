"""Ask a running server with the openai client, streaming, and tell how long the first token took.

    python -m vllm.entrypoints.openai.api_server --model MODEL --attention-backend OSCAR --max-model-len 4096 &
    python examples/openai_client.py [--url http://127.0.0.1:8000/v1] [--document FILE] [QUESTION ...]

Every question follows the same document: from the second on, the server finds it in its prefix cache.
"""

import argparse
import time
from pathlib import Path

from openai import OpenAI

from oscar_vllm.calibration.text import held_out_text

QUESTIONS = ["Summarize the text in one sentence.", "Name one function in it.", "Name another one."]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--document", type=Path, help="UTF-8 text; left out: one that ships")
    parser.add_argument("--characters", type=int, default=4000, help="how much of the document to send")
    parser.add_argument("question", nargs="*", default=QUESTIONS)
    arguments = parser.parse_args()
    document = arguments.document.read_text() if arguments.document else held_out_text()
    client = OpenAI(base_url=arguments.url, api_key="none")
    model = client.models.list().data[0].id
    for question in arguments.question:
        content = f"{document[: arguments.characters]}\n\n{question}"
        start, first = time.perf_counter(), None
        print(f"\n> {question}")
        stream = client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": content}],
            temperature=0,
            max_tokens=48,
            stream=True,
        )
        for part in stream:
            text = part.choices[0].delta.content if part.choices else None
            if text:
                first = first or time.perf_counter() - start
                print(text, end="", flush=True)
        print(f"\n  [first token after {1000 * (first or 0):.0f} ms]")


if __name__ == "__main__":
    main()
