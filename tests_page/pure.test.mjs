// The studio's modules without a document: `node --test tests_page`.

import assert from "node:assert/strict";
import { execFileSync } from "node:child_process";
import { test } from "node:test";

import { asCurl, asPython, python } from "../misvo/studio/code.js";
import { diff, words } from "../misvo/studio/diff.js";
import { duration, figure, oneLine, percent, signed, size } from "../misvo/studio/format.js";
import { by } from "../misvo/studio/order.js";
import { extent, linear, rounded, ticks, tint } from "../misvo/studio/scale.js";
import { EventParser } from "../misvo/studio/sse.js";
import { createStore } from "../misvo/studio/state.js";
import { rewardBody, rewardName, termBody, typedTerms } from "../misvo/studio/terms.js";

test("figures: few digits, a true minus, and what is not known is no 0", () => {
  assert.equal(figure(null), "–");
  assert.equal(figure(undefined), "–");
  assert.equal(figure(NaN), "–");
  assert.equal(figure(0), "0.000");
  assert.equal(figure(-0.25), "−0.250");
  assert.equal(figure(123.4), "123");
  assert.equal(figure(0.00002), "2.0e−5");
  assert.equal(figure(Infinity), "∞");
  assert.equal(signed(0.5, 1), "+0.5");
  assert.equal(signed(-0.5, 1), "−0.5");
});

test("shares, times and sizes", () => {
  assert.equal(percent(0.5), "50 %");
  assert.equal(percent(0.015), "1.5 %");
  assert.equal(percent(0.0001), "<0.1 %");
  assert.equal(percent(0), "0.0 %");
  assert.equal(percent(null), "–");
  assert.equal(duration(0.4), "under a second");
  assert.equal(duration(42.4), "42 s");
  assert.equal(duration(600), "10 min");
  assert.equal(size(134515008), "135M");
  assert.equal(size(4e9), "4B");
});

test("a prompt in one line: the last thing that the user said, cut where it is long", () => {
  assert.equal(oneLine("a\n b"), "a b");
  assert.equal(oneLine([{ role: "user", content: "first" }, { role: "assistant", content: "x" }, { role: "user", content: "last" }]), "last");
  assert.equal(oneLine("x".repeat(100), 10), `${"x".repeat(9)}…`);
});

test("round ticks cover a range", () => {
  assert.deepEqual(ticks([0, 1], 4), [0, 0.5, 1]);
  assert.deepEqual(ticks([0, 0.4], 4), [0, 0.1, 0.2, 0.3, 0.4]);
  assert.deepEqual(ticks([1, 6], 6), [1, 2, 3, 4, 5, 6]);
  for (const [low, high] of [[0.013, 0.17], [-3, 12], [1e-6, 3e-6], [80, 120]]) {
    const [from, to] = rounded([low, high]);
    assert.ok(from <= low && to >= high, `${from} ${to}`);
    const found = ticks([from, to]);
    assert.ok(found.length >= 3 && found.length <= 8, String(found));
  }
});

test("the extent of values skips what is not known and never has no width", () => {
  assert.deepEqual(extent([3, null, NaN, 1]), [1, 3]);
  assert.deepEqual(extent([]), [0, 1]);
  const [low, high] = extent([5, 5]);
  assert.ok(low < 5 && high > 5);
  assert.equal(linear([0, 2], [10, 30])(1), 20);
});

test("tints: none at 0, two thirds at 0.4 nats, never above 1", () => {
  assert.equal(tint(0), 0);
  assert.equal(tint(-1), 0);
  assert.equal(tint(NaN), 0);
  assert.ok(Math.abs(tint(0.4) - (1 - Math.exp(-1))) < 1e-12);
  assert.ok(tint(100) <= 1 && tint(100) > 0.999);
});

test("events come whole, whatever the network cuts", () => {
  const stream = 'id: 0\ndata: {"type":"started"}\n\n: keep-alive\n\nid: 1\ndata: {"type":"step","text":"a\\n\\nb"}\n\n';
  for (let at = 0; at <= stream.length; at += 1) {
    const parser = new EventParser();
    const events = [...parser.push(stream.slice(0, at)), ...parser.push(stream.slice(at))];
    assert.deepEqual(events, [{ id: 0, data: { type: "started" } }, { id: 1, data: { type: "step", text: "a\n\nb" } }], `cut at ${at}`);
  }
});

test("two texts, word by word: both can be put together again from their difference", () => {
  const pairs = [["the cat sat", "the dog sat down"], ["", "new"], ["same", "same"], ["a b c d", "d c b a"], ["Good night!\nSleep.", "Good  night! Sleep well."]];
  for (const [left, right] of pairs) {
    const parts = diff(left, right);
    assert.equal(parts.filter((part) => part.kind !== "right").map((part) => part.text).join(""), left);
    assert.equal(parts.filter((part) => part.kind !== "left").map((part) => part.text).join(""), right);
  }
  assert.deepEqual(diff("the cat sat", "the dog sat"), [
    { kind: "same", text: "the " }, { kind: "left", text: "cat" }, { kind: "right", text: "dog" }, { kind: "same", text: " sat" },
  ]);
  assert.deepEqual(words("don't stop-now"), ["don't", " ", "stop", "-", "now"]);
  const long = Array.from({ length: 3000 }, (_, i) => `w${i}`).join(" ");
  assert.equal(diff(long, `${long} more`).length, 2); // too long to compare: two blocks
});

test("parts of a reward: typed, sent, and typed again", () => {
  const typed = [
    { kind: "name", argument: "cheer", weight: 2 },
    { kind: "contains", argument: "sleep, dark room", weight: 1 },
    { kind: "length", argument: "30", weight: -0.5 },
    { kind: "json", argument: "", weight: 1 },
    { kind: "words", argument: "20-40", weight: 1 },
  ];
  assert.deepEqual(rewardBody(typed), [
    { name: "cheer", weight: 2 }, { contains: ["sleep", "dark room"] }, { length: 30, weight: -0.5 }, { json: true }, { words: "20-40" },
  ]);
  assert.deepEqual(typedTerms(rewardBody(typed)), typed);
  assert.deepEqual(rewardBody(typed.slice(0, 1)), { name: "cheer", weight: 2 });
  assert.deepEqual(typedTerms("contains:a,b"), [{ kind: "contains", argument: "a,b", weight: 1 }]);
  assert.deepEqual(typedTerms("sentiment"), [{ kind: "name", argument: "sentiment", weight: 1 }]);
  assert.equal(rewardName(rewardBody(typed.slice(0, 2))), "2 × cheer + contains: sleep, dark room");
});

test("what cannot be sent is said in a sentence", () => {
  assert.throws(() => termBody({ kind: "contains", argument: " , ", weight: 1 }), /words or phrases/);
  assert.throws(() => termBody({ kind: "length", argument: "ten", weight: 1 }), /whole number/);
  assert.throws(() => termBody({ kind: "json", argument: "{", weight: 1 }), /not JSON/);
  assert.throws(() => termBody({ kind: "similarity", argument: "", weight: 1 }), /wants a text/);
});

test("responses are sorted with the unknown last, both ways, and equals as they were sampled", () => {
  const rows = [{ step: 1, rollout: 0, reward: 1 }, { step: 0, rollout: 1, reward: null }, { step: 0, rollout: 0, reward: 1 }, { step: 0, rollout: 2, reward: 3, parts: { a: 5 } }];
  const keys = (name, down) => [...rows].sort(by(name, down)).map((c) => `${c.step}/${c.rollout}`);
  assert.deepEqual(keys("reward", true), ["0/2", "0/0", "1/0", "0/1"]);
  assert.deepEqual(keys("reward", false), ["0/0", "1/0", "0/2", "0/1"]);
  assert.equal(keys("parts.a", true)[0], "0/2");
});

test("a store tells once in a turn, and only who listens", async () => {
  const store = createStore({ a: 1, b: 2 });
  const heard = [];
  store.on(["a"], (state) => heard.push(["a", state.a]));
  store.on(["b"], () => heard.push(["b"]));
  store.set({ a: 2 });
  store.set({ a: 3 });
  await null;
  await null;
  assert.deepEqual(heard, [["a", 3]]);
});

const HOSTILE = { prompt: "it's \"so\"\n\\ ‮ 𝄞 '''", reward: { contains: ["a'b", "$(touch x)"] }, max_new_tokens: 8, seed: 3, preset: "auto", standardize: true };

test("Python code says what was asked for, whatever the texts hold", () => {
  const code = asPython(HOSTILE, "m'\"", "http://127.0.0.1:8000");
  const check = `
import json, sys, types
said = {}
class Client:
    def __init__(self, **options):
        self.chat = types.SimpleNamespace(completions=types.SimpleNamespace(create=self.create))
    def create(self, **given):
        said.update(given)
        message = types.SimpleNamespace(content="x")
        return types.SimpleNamespace(choices=[types.SimpleNamespace(message=message)], misvo={"answers": [0]})
sys.modules["openai"] = types.SimpleNamespace(OpenAI=Client)
exec(sys.stdin.read())
print("SAID" + json.dumps(said))`;
  const out = execFileSync("python3", ["-c", check], { input: code, encoding: "utf8" });
  const said = JSON.parse(out.slice(out.indexOf("SAID") + 4));
  assert.equal(said.messages[0].content, HOSTILE.prompt);
  assert.equal(said.model, "m'\"");
  assert.deepEqual(said.extra_body.misvo, { reward: HOSTILE.reward, preset: "auto", standardize: true });
  assert.equal(said.max_tokens, 8);
  assert.equal(said.seed, 3);
  assert.equal(python([null, true, { a: 1.5 }]), '[None, True, {"a": 1.5}]');
});

test("a shell reads the curl line as one body", () => {
  const line = asCurl(HOSTILE, "http://127.0.0.1:8000").replace(/^curl/, "printf '%s\\n'");
  const out = execFileSync("sh", ["-c", line], { encoding: "utf8" });
  assert.deepEqual(JSON.parse(out.slice(out.indexOf("-d\n") + 3)), HOSTILE);
});
