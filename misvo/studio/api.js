// The server, as functions. What it refuses is an `ApiError` with its own sentence; silence is `Unreachable`.

import { EventParser } from "/studio/sse.js";

const BASE = "/misvo/v1";
const KEY = "misvo-key"; // in this tab alone

export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export class Unreachable extends Error {}

let askForKey = null; // () => Promise<string>

/** Who is asked when the server wants a key. */
export function onKeyNeeded(ask) {
  askForKey = ask;
}

async function call(method, path, body, signal) {
  const headers = {};
  const key = sessionStorage.getItem(KEY);
  if (key) headers.Authorization = `Bearer ${key}`;
  if (body !== undefined && !(body instanceof Blob)) headers["Content-Type"] = "application/json";
  let answer;
  try {
    answer = await fetch(path, { method, headers, signal, cache: "no-store", body: body instanceof Blob ? body : JSON.stringify(body) });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Unreachable("The server does not answer.");
  }
  if (answer.status === 401 && askForKey) {
    sessionStorage.setItem(KEY, await askForKey());
    return call(method, path, body, signal);
  }
  if (!answer.ok) throw new ApiError(answer.status, await sentence(answer));
  return answer;
}

async function sentence(answer) {
  try {
    return (await answer.json()).error.message;
  } catch {
    return `The server answered with status ${answer.status}.`;
  }
}

async function json(method, path, body, signal) {
  return (await call(method, BASE + path, body, signal)).json();
}

const run = (id) => `/runs/${encodeURIComponent(id)}`;
const steering = (name) => `/steerings/${encodeURIComponent(name)}`;

export const api = {
  models: async () => (await json("GET", "/models")).models,
  rewards: () => json("GET", "/rewards"),
  settings: () => json("GET", "/settings"),
  status: () => json("GET", "/status"),
  runs: async () => (await json("GET", "/runs")).runs,
  start: (body) => json("POST", "/runs", body),
  run: (id) => json("GET", run(id)),
  cancel: (id) => json("POST", `${run(id)}/cancel`),
  candidates: (id, step) => json("GET", `${run(id)}/candidates?fields=light&limit=5000${step === undefined ? "" : `&step=${step}`}`),
  candidate: (id, step, rollout, signal) => json("GET", `${run(id)}/candidates/${step}/${rollout}`, undefined, signal),
  panel: (id, heldOut) => json("POST", `${run(id)}/panel`, heldOut ? { held_out: heldOut } : {}),
  fluency: (id) => json("POST", `${run(id)}/fluency`),
  generate: (body, signal) => json("POST", "/generate", body, signal),
  steerings: async () => (await json("GET", "/steerings")).steerings,
  saveSteering: (id, name) => json("POST", "/steerings", { run: id, name }),
  deleteSteering: (name) => json("DELETE", steering(name)),
  steeringFile: async (name) => (await call("GET", `${BASE}${steering(name)}/safetensors`)).blob(),
  loadSteering: async (name, file) => (await call("PUT", `${BASE}${steering(name)}/safetensors`, file)).json(),
  alive: async () => {
    try {
      return (await fetch("/health", { cache: "no-store" })).ok;
    } catch {
      return false;
    }
  },

  /** The events of a run behind number `after`, as they come, until it is over: {id, data}. */
  async *events(id, after, signal) {
    const answer = await call("GET", `${BASE}${run(id)}/events?starting_after=${after}`, undefined, signal);
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    const parser = new EventParser();
    try {
      while (true) {
        const { done, value } = await reader.read();
        if (done) return;
        yield* parser.push(value);
      }
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new Unreachable("The server no longer answers.");
    } finally {
      reader.cancel().catch(() => {});
    }
  },
};
