// Settings with their own help, as the server describes them. What is left empty is the preset's.

import { field, h, show } from "/studio/dom.js";

// What a first visitor may want to change; the rest is behind "All settings". The values make a first run quick.
const FIRST = { rollouts: 16, steps: 6, max_new_tokens: 48, kl_budget_per_token: "", seed: 42 };
const LABELS = { rollouts: "Responses per step", steps: "Steps", max_new_tokens: "Tokens per response", kl_budget_per_token: "Budget, nats per token", seed: "Seed" };

/** Gives {element, values(), sizes(), fill(given)}. */
export function settingsEditor({ presets, settings }) {
  const controls = new Map();
  const preset = h("select", { name: "preset", data: { testid: "preset" } }, presets.map((name) => h("option", { value: name }, name)));
  const known = settings.filter(({ name }) => name !== "seed" || true);

  function control(setting, value = "") {
    const { name, about, names, type } = setting;
    const empty = setting.default === null || setting.default === undefined ? "" : String(setting.default);
    let input;
    if (names.length) input = h("select", { name }, h("option", { value: "" }, empty ? `${empty} (preset)` : "preset"), names.map((one) => h("option", { value: one }, one)));
    else if (/bool/.test(type)) input = h("select", { name }, h("option", { value: "" }, "preset"), h("option", { value: "true" }, "yes"), h("option", { value: "false" }, "no"));
    else if (/int|float/.test(type)) input = h("input", { name, type: "number", step: /float/.test(type) ? "any" : 1, value, placeholder: empty });
    else input = h("input", { name, type: "text", value, placeholder: empty });
    input.dataset.testid = `setting-${name}`;
    controls.set(name, { input, type, name });
    return field(LABELS[name] ?? name, input, about);
  }

  const first = known.filter(({ name }) => name in FIRST).sort((a, b) => Object.keys(FIRST).indexOf(a.name) - Object.keys(FIRST).indexOf(b.name));
  const rest = known.filter(({ name }) => !(name in FIRST));
  const element = h("div", {},
    field("Preset", preset, "auto needs no tuning; paper is the paper's Algorithm 1 as printed."),
    h("div", { class: "grid-2" }, first.map((setting) => control(setting, FIRST[setting.name]))),
    h("details", {}, h("summary", {}, "All settings"), h("div", { class: "grid-2" }, rest.map((setting) => control(setting)))));

  function read({ input, type, name }) {
    const text = input.value.trim();
    if (text === "") return undefined;
    if (/bool/.test(type)) return text === "true";
    if (/int|float/.test(type)) {
      const number = Number(text);
      if (!Number.isFinite(number)) throw new Error(`${LABELS[name] ?? name} must be a number.`);
      return number;
    }
    return text;
  }

  function values() {
    const made = { preset: preset.value };
    for (const one of controls.values()) {
      const value = read(one);
      if (value !== undefined) made[one.name] = value;
    }
    return made;
  }

  return {
    element,
    values,
    sizes() {
      const of = (name) => Number(controls.get(name)?.input.value || settings.find((one) => one.name === name)?.default || 0);
      return { rollouts: of("rollouts"), steps: of("steps"), max_new_tokens: of("max_new_tokens") };
    },
    fill(given) {
      if (given.preset) preset.value = given.preset;
      for (const { input, name } of controls.values()) {
        const value = given[name];
        input.value = value === undefined || value === null ? "" : Array.isArray(value) ? value.join(", ") : String(value);
      }
    },
  };
}
