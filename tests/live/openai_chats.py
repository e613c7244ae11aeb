"""Chats of several streamed turns by OpenAI's own client, in an engine's environment: `openai_chats.py URL COUNT`.

Prints, as JSON, what each turn of each chat was answered and why it ended.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
from typing import Any

from openai import AsyncOpenAI  # pyright: ignore[reportMissingImports]

_TURNS = 3


async def chat(client: Any, number: int) -> list[tuple[str, int, str]]:
    chance = random.Random(number)
    messages = [{"role": "user", "content": "".join(chance.choices("abcdefghij ", k=chance.randint(20, 400)))}]
    turns: list[tuple[str, int, str]] = []
    for turn in range(_TURNS):
        text, tokens, ended = "", 0, ""
        parts = await client.chat.completions.create(
            model="m",
            messages=messages,
            max_tokens=12,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True},
        )
        async for part in parts:
            tokens = part.usage.completion_tokens if part.usage else tokens
            for choice in part.choices:
                text, ended = text + (choice.delta.content or ""), choice.finish_reason or ended
        turns.append((text, tokens, ended))
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": f"more {turn}"}]
    return turns


async def main(url: str, count: int) -> None:
    client = AsyncOpenAI(base_url=f"{url}/v1", api_key="none", timeout=120)
    sys.stdout.write(json.dumps(await asyncio.gather(*(chat(client, number) for number in range(count)))))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2])))
