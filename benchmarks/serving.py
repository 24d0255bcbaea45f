"""`misvo serve` under load: tokens for each second of CPU time against `steer_many`, and what a client waits extra.

    python benchmarks/serving.py --clients 32 --rounds 3 --json serving.json

The server runs in this process, its clients (the `openai` package) in another one, so that their own work is not
counted: in one round the clients ask for all prompts at once, in the next `steer_many` has the same prompts. The
answers have to be the same. After that one client asks for short answers, one after another, and each is held against
the same call of the policy itself.
"""

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import threading
import time
from contextlib import contextmanager

from measure import PROMPTS, spread, write_json

import misvo

REWARDS = ("length:12", "contains:you,your", "words:10-20", "avoids:the")


def cases(count: int, rollouts: int, steps: int, tokens: int) -> list[dict]:
    """What each client asks for: prompts and rewards differ."""
    return [
        {
            "messages": [{"role": "user", "content": f"{PROMPTS[index % len(PROMPTS)]} ({index})"}],
            "max_tokens": tokens,
            "seed": index,
            "misvo": {"reward": REWARDS[index % len(REWARDS)], "rollouts": rollouts, "steps": steps},
        }
        for index in range(count)
    ]


@contextmanager
def serving(policy, port=0):
    """A real server on loopback, in a thread of this process."""
    import uvicorn

    from misvo.server import Config, create_app

    app = create_app(policy, {}, Config(name="served"))
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=port, log_level="warning", ws="none"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}/v1"
    finally:
        server.should_exit = True
        thread.join(20)


def clients(url: str) -> None:
    """The other process: all requests of standard input at once; prints answers."""
    import openai

    async def ask(asked):
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=3600) as client:
            create = client.chat.completions.create
            told = await asyncio.gather(
                *(create(model="served", extra_body={"misvo": one.pop("misvo")}, **one) for one in asked)
            )
            return [[one.choices[0].message.content, one.usage.completion_tokens] for one in told]

    print("ready", flush=True)
    for line in sys.stdin:
        print(json.dumps(asyncio.run(ask(json.loads(line)))), flush=True)


@contextmanager
def another_process(url: str):
    """Answers of clients in a process of their own."""
    command = [sys.executable, __file__, "--ask", url]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(asked):
        child.stdin.write(json.dumps(asked) + "\n")
        child.stdin.flush()
        return json.loads(child.stdout.readline())

    assert child.stdout.readline() == "ready\n"
    try:
        yield ask
    finally:
        child.stdin.close()
        child.wait(20)


def together(policy, asked) -> list[list]:
    """The same as `steer_many` has it: one session to which everything is added before the first step."""
    with misvo.Session(policy) as session:
        handles = []
        for one in asked:
            settings = misvo.Settings.from_preset(
                rollouts=one["misvo"]["rollouts"],
                steps=one["misvo"]["steps"],
                max_new_tokens=one["max_tokens"],
                seed=one["seed"],
            )
            handles.append(session.add(one["messages"], one["misvo"]["reward"], settings))
        while session.busy:
            session.step()
    return [[h.result.text, sum(len(c.tokens) for c in h.result.candidates)] for h in handles]


def measured(call):
    wall, cpu = time.perf_counter(), time.process_time()
    told = call()
    return told, time.perf_counter() - wall, time.process_time() - cpu


def extra(policy, url, count=30) -> list[float]:
    """Seconds that a client waits longer than a caller of the policy, for answers of a few tokens."""
    import openai

    client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
    over = []
    for seed in range(count + 3):
        asked = {"prompt": PROMPTS[seed % len(PROMPTS)], "max_tokens": 8, "seed": seed}
        started = time.perf_counter()
        client.completions.create(model="served", **asked)
        between = time.perf_counter()
        policy.generate(asked["prompt"], max_new_tokens=8, seed=seed, raw=True)
        over.append(2 * between - started - time.perf_counter())
    return over[3:]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--rollouts", type=int, default=4)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--max-new-tokens", type=int, default=32)
    parser.add_argument("--json")
    parser.add_argument("--ask", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.ask:
        return clients(arguments.ask)
    policy = misvo.Policy.from_pretrained("smollm2-135m")
    asked = cases(arguments.clients, arguments.rollouts, arguments.steps, arguments.max_new_tokens)
    rounds = []
    with serving(policy) as url, another_process(url) as ask:
        ask(asked[:1])
        for number in range(arguments.rounds):
            served, wall, cpu = measured(lambda: ask(asked))
            many, many_wall, many_cpu = measured(lambda: together(policy, asked))
            same = sum(one == other for one, other in zip(served, many, strict=True))
            tokens = sum(one[1] for one in many)
            print(f"round {number}: {tokens} tokens, {same} of {len(asked)} answers the same")
            print(f"    seconds {wall:.1f}, of steer_many {many_wall:.1f}; of CPU time {cpu:.1f} and {many_cpu:.1f}")
            rounds.append({"tokens": tokens, "cpu": cpu, "many_cpu": many_cpu, "wall": wall, "many_wall": many_wall})
            assert same == len(asked)
        waits = extra(policy, url)
    ratios = [one["many_cpu"] / one["cpu"] for one in rounds]
    ratio, wait = statistics.median(ratios), 1000 * statistics.median(waits)
    print(f"tokens per second of CPU time against steer_many: {ratio:.3f} (spread {spread(ratios):.3f})")
    print(f"a client's extra time: {wait:.1f} ms (90 % under {1000 * sorted(waits)[-len(waits) // 10]:.1f} ms)")
    write_json(arguments.json, {"arguments": vars(arguments), "rounds": rounds, "ratios": ratios, "extra": waits})


if __name__ == "__main__":
    main()
