// Settings with their own help, as the server describes them. What is left empty is the preset's.

import { field, h, show } from "/studio/dom.js";

const QUICK = { rollouts: 16, steps: 6, max_new_tokens: 48, seed: 42 }; // a first run of half a minute
const LABELS = { rollouts: "Responses per step", steps: "Steps", max_new_tokens: "Tokens per response", kl_budget_per_token: "Budget, nats per token", seed: "Seed" };
const GROUPS = { first: null, sampling: "Sampling", search: "Search", stopping: "Stopping early" };

/** Gives {element, values(), sizes(), fill(given)}. */
export function settingsEditor({ presets, settings }) {
  const controls = new Map();
  const preset = h("select", { name: "preset", data: { testid: "preset" } }, presets.map((name) => h("option", { value: name }, name)));

  function control(setting) {
    const { name, about, names, type } = setting;
    let input;
    if (names.length) input = h("select", { name }, h("option", { value: "" }), names.map((one) => h("option", { value: one }, one)));
    else if (/bool/.test(type)) input = h("select", { name }, h("option", { value: "" }), h("option", { value: "true" }, "yes"), h("option", { value: "false" }, "no"));
    else if (/int|float/.test(type)) input = h("input", { name, type: "number", step: /float/.test(type) ? "any" : 1, value: QUICK[name] ?? "" });
    else input = h("input", { name, type: "text" });
    input.dataset.testid = `setting-${name}`;
    controls.set(name, { input, setting });
    return field(LABELS[name] ?? name.replaceAll("_", " "), input, about);
  }

  /** An empty control shows what the preset has in its place. */
  function tellDefaults() {
    for (const { input, setting } of controls.values()) {
      const held = setting.defaults?.[preset.value] ?? setting.default;
      const text = held === null || held === undefined || held?.length === 0 ? "as the model came" : held === true ? "yes" : held === false ? "no" : String(held);
      if (input.tagName === "SELECT") show(input.options[0], text);
      else input.placeholder = text;
    }
  }

  const grids = Object.entries(GROUPS).map(([group, title]) => {
    const members = settings.filter((setting) => (setting.group ?? "search") === group);
    const grid = h("div", { class: "grid-2" }, members.map(control));
    if (!members.length) return null;
    return title ? h("details", {}, h("summary", {}, title), grid) : grid;
  });
  const element = h("div", { class: "settings" }, field("Preset", preset, "auto needs no tuning; paper is the paper's Algorithm 1 as printed."), grids);
  preset.addEventListener("change", tellDefaults);
  tellDefaults();

  function read({ input, setting: { name, type } }) {
    const text = input.value.trim();
    if (text === "") {
      if (input.validity?.badInput) throw new Error(`${LABELS[name] ?? name} must be a number.`);
      return undefined;
    }
    if (/bool/.test(type)) return text === "true";
    return /int|float/.test(type) ? Number(text) : text;
  }

  return {
    element,
    /** What was chosen; entries that were left empty are the preset's. */
    values() {
      const made = { preset: preset.value };
      for (const [name, one] of controls) {
        const value = read(one);
        if (value !== undefined) made[name] = value;
      }
      return made;
    },
    sizes() {
      const of = (name) => Number(controls.get(name)?.input.value || controls.get(name)?.input.placeholder || 0);
      return { rollouts: of("rollouts"), steps: of("steps"), max_new_tokens: of("max_new_tokens") };
    },
    fill(given) {
      if (given.preset) preset.value = given.preset;
      for (const [name, { input }] of controls) {
        const value = given[name];
        input.value = value === undefined || value === null ? "" : Array.isArray(value) ? value.join(", ") : String(value);
      }
      tellDefaults();
    },
  };
}
