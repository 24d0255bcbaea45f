// What is kept: runs of this server, and steerings by name.

import { h, show } from "/studio/dom.js";
import { figure, oneLine } from "/studio/format.js";
import { over } from "/studio/state.js";

const MOST = 12; // runs in the list

export function shelfView(element, store, actions) {
  const runs = h("ul", { class: "shelf", data: { testid: "runs" } });
  const steerings = h("ul", { class: "shelf", data: { testid: "steerings" } });
  const name = h("input", { type: "text", "aria-label": "Name of the steering", placeholder: "name", maxlength: 64, data: { testid: "steering-name" } });
  const save = h("button", { type: "button", class: "quiet", data: { testid: "save-steering" }, on: { click: () => actions.saveSteering(name.value.trim()) } }, "Save this run's steering");
  const file = h("input", { type: "file", accept: ".safetensors", id: "steering-file", class: "unseen", data: { testid: "steering-file" }, on: { change: () => {
    if (file.files.length) actions.loadSteering(file.files[0]);
    file.value = "";
  } } });
  const load = h("label", { for: "steering-file", class: "button quiet" }, "Load a file");
  const runsCard = h("section", { class: "card" }, h("h2", {}, "Runs"), runs);
  const steeringsCard = h("section", { class: "card" }, h("h2", {}, "Steerings"), h("div", { class: "row" }, name, save), steerings, h("div", { class: "row" }, file, load));
  show(element, runsCard, steeringsCard);

  store.on(["runs", "run"], ({ runs: known, run }) => {
    runsCard.hidden = !known.length;
    show(runs, known.slice(0, MOST).map((one) => h("li", {}, h("a", { href: `#run=${encodeURIComponent(one.id)}`, "aria-current": one.id === run?.id ? "true" : null, dir: "auto" }, oneLine(one.prompt, 60)),
      h("small", {}, over(one) ? (one.answer ? figure(one.answer.reward) : one.state) : "running"))));
  });

  store.on(["steerings", "run", "model"], ({ steerings: known, run, model }) => {
    steeringsCard.hidden = model === null;
    save.disabled = !run?.steering;
    show(steerings, known.map((one) => h("li", { data: { steering: one.name } }, h("span", {}, one.name),
      h("span", { class: "row" },
        h("button", { type: "button", class: "quiet", on: { click: () => actions.trySteering(one.name) } }, "Try"),
        h("button", { type: "button", class: "quiet", "aria-label": `Download ${one.name}`, on: { click: () => actions.download(one.name) } }, "↓"),
        h("button", { type: "button", class: "quiet", "aria-label": `Delete ${one.name}`, on: { click: () => actions.deleteSteering(one.name) } }, "×")))));
  });
}
