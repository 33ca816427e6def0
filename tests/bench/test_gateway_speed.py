"""How many tokens a second the gateway passes on: 200 streams, a fake generator, a real socket.

    PYTHONPATH=tests python tests/bench/test_gateway_speed.py [--streams N] [--tokens N] [--step S]

The client is another process that only counts bytes, so the time is the gateway's. Two figures:
*paced*, one token a stream each step, each leaving in a chunk of its own, as a served model gives
them: what counts is the share of one core; and *flood*, steps as fast as the loop takes them, where
tokens that are ready together leave together.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time

from gateway_fakes import FakeGenerator, gateway, small_text

from flexslurm.gateway.choice import Choice, EndRules
from flexslurm.messages import SequenceRequest, TokenEvent

CLIENT = """
import asyncio, sys
async def one(port, body):
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = "POST /v1/chat/completions HTTP/1.1\\r\\nHost: x\\r\\n"
    head += "Content-Type: application/json\\r\\n"
    writer.write(f"{head}Content-Length: {len(body)}\\r\\n\\r\\n{body}".encode())
    count, tail = 0, b""
    while b"[DONE]" not in tail:
        data = await reader.read(1 << 16)
        if not data:
            raise SystemExit("cut off: " + repr(tail[-200:]))
        count += data.count(b"data: ")
        tail = (tail + data)[-200:]
    writer.close()
    return count
async def main():
    port, streams, body = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    print(sum(await asyncio.gather(*(one(port, body) for _ in range(streams)))))
asyncio.run(main())
"""


def answer(request: SequenceRequest, position: int) -> int:
    return WORDS[position % len(WORDS)]


WORDS = small_text().encode(" the stream of naïve text goes on", add_special_tokens=False)


async def measure(streams: int, tokens: int, step_s: float) -> dict[str, float]:
    """Tokens per second of wall time and of the gateway's own processor time."""
    generator = FakeGenerator(answer, context=100_000, step_s=step_s)
    generator.held = True
    async with gateway(generator) as g:
        body = json.dumps(
            {
                "messages": [{"role": "user", "content": "go"}],
                "stream": True,
                "max_tokens": tokens,
                "ignore_eos": True,
            }
        )
        client = await asyncio.create_subprocess_exec(
            sys.executable, "-c", CLIENT, str(g.server.port), str(streams), body,
            stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        while len(generator.live) < streams:
            await asyncio.sleep(0.01)
        wall, cpu = time.monotonic(), time.process_time()
        generator.hold(False)
        output, _ = await client.communicate()
        wall, cpu = time.monotonic() - wall, time.process_time() - cpu
        total = streams * tokens
        return {
            "tokens": total,
            "chunks": int(output),
            "wall_s": round(wall, 3),
            "tokens_per_s": round(total / wall),
            "tokens_per_cpu_s": round(total / cpu),
            "cpu_us_per_token": round(1e6 * cpu / total, 1),
        }


def test_a_token_costs_well_under_a_millisecond() -> None:
    found = asyncio.run(measure(streams=50, tokens=40, step_s=0.0))
    print("\n", found, end="")
    assert found["cpu_us_per_token"] < 500


def test_the_cost_of_a_token_does_not_grow_with_the_text() -> None:
    """Text, stop strings and all: the last thousand tokens cost what the first did."""
    choice = Choice(
        0, small_text().detokenizer(skip_special=True), EndRules(stop_strings=("\n\n", "never"))
    )
    times_s: list[float] = []
    for batch in range(40):
        begun = time.perf_counter()
        for position in range(batch * 1000, batch * 1000 + 1000):
            token = WORDS[position % len(WORDS)]
            choice.push(TokenEvent(seq_id="x/0", token=token, position=position))
            choice.take()
        times_s.append(time.perf_counter() - begun)
    first, last = min(times_s[:10]), min(times_s[-10:])
    print(f"\n{1e3 * first:.1f} µs a token at first, {1e3 * last:.1f} at last", end="")
    assert last < 3 * first


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--step", type=float, default=0.05, help="seconds per step when paced")
    options = parser.parse_args()
    for name, step_s in (("paced", options.step), ("flood", 0.0)):
        found = asyncio.run(measure(options.streams, options.tokens, step_s))
        print(name, json.dumps(found))


if __name__ == "__main__":
    main()
