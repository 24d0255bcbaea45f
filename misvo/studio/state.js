// What the page knows, in one place. Views read it and hear of changes by name; only `set` changes it. No document here.

export function createStore(initial) {
  const state = { ...initial };
  const listeners = []; // [names, listener]
  let changed = new Set();

  function tell() {
    const now = changed;
    changed = new Set();
    for (const [names, listener] of listeners) if (names.some((name) => now.has(name))) listener(state);
  }

  return {
    state,
    /** Change some entries; listeners hear of all changes of a turn at once. */
    set(patch) {
      if (changed.size === 0) queueMicrotask(tell);
      for (const name of Object.keys(patch)) changed.add(name);
      Object.assign(state, patch);
    },
    /** Call `listener` when one of these entries was set. */
    on(names, listener) {
      listeners.push([names, listener]);
    },
  };
}

export const EMPTY_RUN = {
  run: null, // what GET /runs/ID says
  rows: [], // trace rows, in order
  left: null, // seconds
  candidates: [], // of all steps so far
  detail: null, // one response token by token
  source: null, // whose vectors are tried: {run: ID} or {steering: NAME}, with its prompt
  pair: null, // {strength, reference, steered}
  curve: null, // [{strength, reward, kl_per_token}]
  panel: null, // measures by name
  picked: [], // keys of one or two candidates
};

export const store = createStore({
  connected: true,
  model: null,
  rewards: null,
  presets: [],
  settings: [],
  status: null,
  runs: [],
  steerings: [],
  ...EMPTY_RUN,
});

export const over = (run) => run !== null && ["completed", "failed", "cancelled"].includes(run.state);
export const keyOf = (candidate) => `${candidate.step}/${candidate.rollout}`;
