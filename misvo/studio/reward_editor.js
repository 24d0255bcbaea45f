// The parts of a reward: what each is, what it takes, and how much it weighs.

import { h, show, unique } from "/studio/dom.js";
import { figure } from "/studio/format.js";
import { typedTerms } from "/studio/terms.js";

/** `known` is what GET /rewards says. Gives {element, terms(), set(reward)}. */
export function rewardEditor(known, legend, { optional = false } = {}) {
  const choices = [
    ...known.rewards.map(({ name, about }) => ({ value: `name:${name}`, kind: "name", argument: name, text: name, about })),
    ...known.declared.map(({ kind, about, example }) => ({ value: kind, kind, argument: null, text: kind, about, example: example.replace(/^\w+:?/, "") })),
    ...(known.url ? [{ value: "url", kind: "url", argument: null, text: "url", about: "A scorer at an address that this server allows.", example: "https://…" }] : []),
  ];
  const list = h("div", { class: "terms" });
  const element = h("fieldset", { data: { editor: legend } }, h("legend", {}, legend), list,
    h("button", { type: "button", class: "quiet", data: { testid: "add-part" }, on: { click: () => add(choices[list.childElementCount % choices.length]) } }, optional ? "+ reward" : "+ part"));

  function add(choice, argument = null, weight = 1) {
    const select = h("select", { "aria-label": "Kind of reward", data: { testid: "reward-kind" } },
      choices.map((one) => h("option", { value: one.value }, one.text)));
    select.value = choice.value;
    const about = h("small", { id: unique("about") });
    const text = h("input", { type: "text", "aria-label": "What it takes", value: argument ?? choice.example ?? "", dir: "auto", data: { testid: "reward-argument" } });
    const slider = h("input", { type: "range", min: -2, max: 2, step: 0.1, value: weight, "aria-label": "Weight", data: { testid: "reward-weight" } });
    const shown = h("output", {}, figure(weight, 1));
    slider.addEventListener("input", () => show(shown, figure(Number(slider.value), 1)));
    const away = h("button", { type: "button", class: "quiet", "aria-label": "Remove this part" , on: { click: () => {
      if (!optional && list.childElementCount === 1) return;
      row.remove();
      arrange();
    } } }, "×");
    const weighing = h("div", { class: "weight" }, h("span", { "aria-hidden": "true" }, "weight"), slider, shown);
    const row = h("div", { class: "term" }, select, away, text, about, weighing);
    row.read = () => {
      const chosen = choices.find((one) => one.value === select.value);
      return { kind: chosen.kind, argument: chosen.argument ?? text.value, weight: Number(slider.value) };
    };
    const tell = () => {
      const chosen = choices.find((one) => one.value === select.value);
      text.hidden = chosen.argument !== null;
      show(about, chosen.about ?? "");
    };
    select.setAttribute("aria-describedby", about.id);
    select.addEventListener("change", () => {
      text.value = choices.find((one) => one.value === select.value).example ?? "";
      tell();
    });
    tell();
    list.append(row);
    arrange();
  }

  function arrange() {
    const alone = list.childElementCount < 2;
    for (const row of list.children) row.classList.toggle("alone", alone);
  }

  if (!optional) add(choices[0]);
  return {
    element,
    terms: () => [...list.children].map((row) => row.read()),
    set(reward) {
      show(list);
      for (const { kind, argument, weight } of typedTerms(reward)) {
        const choice = choices.find((one) => (kind === "name" ? one.value === `name:${argument}` : one.value === kind));
        if (choice) add(choice, argument, weight);
      }
      if (!optional && !list.childElementCount) add(choices[0]);
      arrange();
    },
  };
}
