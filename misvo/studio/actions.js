// What the page does: start a run and follow it, read responses, sample at strengths, keep steerings.
// Every answer goes into the store; views show it from there.

import { api, ApiError, Unreachable } from "/studio/api.js";
import { asCurl, asPython } from "/studio/code.js";
import { EMPTY_RUN, over } from "/studio/state.js";

const STRENGTHS = [0, 0.4, 0.8, 1.2, 1.6, 2];
const SAMPLES = 4; // at each of them
const wait = (seconds) => new Promise((done) => setTimeout(done, 1000 * seconds));

export function createActions(store, { say, complain, fillForm, formPrompt }) {
  let following = new AbortController(); // the run that is shown
  let reading = new AbortController(); // the response that is read
  let sampling = new AbortController(); // the pair
  let noise = 0;

  /** Do something; what the server refuses is told, and its silence is noticed. */
  async function attempt(work) {
    try {
      return await work();
    } catch (error) {
      if (error.name === "AbortError") return undefined;
      if (error instanceof Unreachable) lost();
      else if (error instanceof ApiError) complain(error.message);
      else throw error;
      return undefined;
    }
  }

  /** The server is silent: say so, and look for it until it is back. */
  async function lost() {
    if (!store.state.connected) return;
    store.set({ connected: false });
    for (let pause = 0.5; !(await api.alive()); pause = Math.min(4, pause * 1.5)) await wait(pause);
    store.set({ connected: true });
    say("The server is back.");
    await refresh();
    const { run } = store.state;
    if (run !== null && !over(run)) await open(run.id, true);
  }

  /** What there is on the server. */
  async function refresh() {
    await attempt(async () => {
      const [runs, steerings] = await Promise.all([api.runs(), api.steerings()]);
      store.set({ runs, steerings });
    });
  }

  async function start(body) {
    complain("");
    await attempt(async () => {
      const run = await api.start(body);
      location.hash = `run=${encodeURIComponent(run.id)}`; // main.js opens it
    });
  }

  /** Show a run and follow it. `again`: what is known of it stays until something better comes. */
  async function open(id, again = false) {
    following.abort();
    following = new AbortController();
    const { signal } = following;
    if (!again) store.set({ ...EMPTY_RUN });
    const run = await attempt(async () => {
      try {
        return await api.run(id);
      } catch (error) {
        if (!(error instanceof ApiError && error.status === 404)) throw error;
        const known = store.state.run;
        if (known?.id === id) store.set({ run: { ...known, state: "failed", error: { message: "The server began anew and no longer has this run; what was seen of it is below." } } });
        else complain("The server has no such run, or no longer.");
        return undefined;
      }
    });
    if (!run || signal.aborted) return;
    store.set({ run });
    if (!again && run.request) fillForm(run.request);
    const wasOver = over(run);
    await attempt(() => follow(id, signal));
    if (!signal.aborted && over(store.state.run) && store.state.connected) await ended(id, signal, wasOver);
  }

  async function follow(id, signal) {
    const rows = [];
    const candidates = [];
    for await (const { data: event } of api.events(id, -1, signal)) {
      if (event.type === "step") {
        rows.push(event.row);
        store.set({ rows: [...rows].sort((a, b) => a.step - b.step), left: event.seconds_left });
        if (!over(store.state.run)) {
          candidates.push(...(await api.candidates(id, event.row.step)).candidates);
          store.set({ candidates: [...candidates] });
        }
      }
      if (event.run) store.set({ run: event.run });
    }
  }

  /** A run is over: its answer token by token, both sides of it, and what it did to the responses. */
  async function ended(id, signal, wasOver) {
    await attempt(async () => {
      const [run, { candidates }, runs] = await Promise.all([api.run(id), api.candidates(id), api.runs()]);
      if (signal.aborted) return;
      const source = run.steering ? { run: id, prompt: run.prompt } : null;
      store.set({ run, candidates, runs, source, panel: run.answer ? "can be asked" : null });
      if (!run.answer) return;
      await read(run.answer);
      say(`The run is over: reward ${run.answer.reward}.`);
      if (source && store.state.model) {
        await sampleAgain(1, false);
        if (!signal.aborted && !wasOver) await curve();
      }
      if (!signal.aborted) await panel();
    });
  }

  async function cancel() {
    const { run } = store.state;
    if (run) await attempt(() => api.cancel(run.id));
  }

  async function read(candidate) {
    reading.abort();
    reading = new AbortController();
    const { run } = store.state;
    const detail = await attempt(() => api.candidate(run.id, candidate.step, candidate.rollout, reading.signal));
    if (detail && store.state.run?.id === run.id) store.set({ detail });
  }

  function pick(key) {
    const { picked } = store.state;
    store.set({ picked: picked.includes(key) ? picked.filter((one) => one !== key) : [...picked, key].slice(-2) });
  }

  /** What a request for samples says of its vectors, prompt and sampler. */
  function order() {
    const { source, run } = store.state;
    const { prompt, ...vectors } = source;
    const settings = source.run && run ? run.settings : null;
    const reward = source.run ? run?.request?.reward : undefined;
    return {
      ...vectors, prompt, seed: 1000 + noise, ...(reward ? { reward } : {}),
      ...(settings ? { max_new_tokens: settings.max_new_tokens, temperature: settings.temperature, top_p: settings.top_p, top_k: settings.top_k ?? undefined, raw: settings.raw } : {}),
      ...(run?.request?.columns && source.run ? { columns: run.request.columns } : {}),
    };
  }

  async function sampleAgain(strength, otherNoise) {
    if (otherNoise) noise += 1;
    sampling.abort();
    sampling = new AbortController();
    store.set({ pair: { strength, ...(store.state.pair ?? {}), waiting: true } }); // what is shown stays until then
    const { source } = store.state;
    const drawn = await attempt(() => api.generate({ ...order(), strength: strength === 0 ? [0] : [0, strength] }, sampling.signal));
    if (!drawn || store.state.source !== source) return;
    const [reference, steered] = [drawn.strengths[0], drawn.strengths.at(-1)];
    store.set({ pair: { strength, reference: reference.samples[0], steered: steered.samples[0], kl_per_token: steered.kl_per_token } });
  }

  async function curve() {
    const { source } = store.state;
    store.set({ curve: "asked" });
    const drawn = await attempt(() => api.generate({ ...order(), strength: STRENGTHS, samples: SAMPLES }));
    if (store.state.source === source) store.set({ curve: drawn ? drawn.strengths : null });
  }

  async function panel() {
    const { run } = store.state;
    store.set({ panel: "asked" });
    const told = await attempt(() => api.panel(run.id, run.request?.held_out));
    if (store.state.run?.id === run.id) store.set({ panel: told ? told.measures : "can be asked" });
  }

  /** Let the judge read every response. */
  async function fluency() {
    const { run } = store.state;
    say("The judge is reading…");
    await attempt(async () => {
      await api.fluency(run.id);
      const { candidates } = await api.candidates(run.id);
      if (store.state.run?.id === run.id) store.set({ candidates });
    });
  }

  async function saveSteering(name) {
    if (!name) return complain("give the steering a name first.");
    return attempt(async () => {
      await api.saveSteering(store.state.run.id, name);
      store.set({ steerings: await api.steerings() });
      say(`Saved as ${name}.`);
    });
  }

  async function trySteering(name) {
    const prompt = formPrompt();
    store.set({ source: { steering: name, prompt }, pair: null, curve: null });
    document.getElementById("welcome").hidden = true;
    await sampleAgain(1, false);
  }

  async function download(name) {
    await attempt(async () => save(`${name}.safetensors`, await api.steeringFile(name)));
  }

  async function loadSteering(file) {
    const name = file.name.replace(/\.safetensors$/, "").replace(/[^\w.-]/g, "_").slice(0, 64);
    await attempt(async () => {
      await api.loadSteering(name, file);
      store.set({ steerings: await api.steerings() });
      say(`Loaded ${name}.`);
    });
  }

  async function deleteSteering(name) {
    await attempt(async () => {
      await api.deleteSteering(name);
      store.set({ steerings: await api.steerings() });
    });
  }

  async function copyText(text) {
    try {
      await navigator.clipboard.writeText(text);
      say("Copied.");
    } catch { // a page without a secure origin has no clipboard
      save("misvo.txt", new Blob([text], { type: "text/plain" }));
    }
  }

  function copy(kind, body) {
    const code = kind === "curl" ? asCurl(body, location.origin) : asPython(body, store.state.model.name, location.origin);
    copyText(code);
  }

  return { start, open, cancel, read, pick, sampleAgain, curve, panel, fluency, saveSteering, trySteering, download, loadSteering, deleteSteering, copy, copyText, refresh, attempt };
}

function save(name, blob) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}
