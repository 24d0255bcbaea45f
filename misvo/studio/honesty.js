// What steering did beside raising the reward: measures of the returned answer, the last step and the model as it was.

import { h, show } from "/studio/dom.js";
import { figure, signed } from "/studio/format.js";

export function honestyView(section, store, actions) {
  const body = h("div", { class: "wide-table", data: { testid: "panel" } });
  const ask = h("button", { type: "button", class: "quiet", on: { click: () => actions.panel() } }, "Measure");
  show(section, h("div", { class: "head" }, h("h2", { id: "honesty-title" }, "What it did to the answers"), ask), body);

  store.on(["panel", "run"], ({ panel, run }) => {
    section.hidden = panel === null;
    if (panel === null || run === null) return;
    ask.hidden = panel !== "can be asked";
    if (panel === "can be asked") return void show(body);
    if (panel === "asked") return void show(body, h("p", { class: "empty" }, "Reading the responses…"));
    if (typeof panel === "string") return void show(body, h("p", { class: "note" }, panel));
    show(body, h("table", {}, h("thead", {}, h("tr", {}, ["", "The answer", "Last step", "As it was", "Last step less as it was"].map((name) => h("th", { scope: "col" }, name)))),
      h("tbody", {}, Object.entries(panel).map(([name, measure]) => h("tr", { data: { measure: name } },
        h("th", { scope: "row" }, measure.about), h("td", {}, figure(measure.returned)), h("td", {}, figure(measure.last)), h("td", {}, figure(measure.reference)),
        h("td", {}, difference(measure.difference)))))),
      h("p", { class: "note" }, "Means over a step's responses; intervals of 95 %. ", run.has_judge === false ? "Start the server with --judge to see fluency under another model." : ""));
  });
}

function difference(told) {
  if (!told) return "–";
  const clear = told.low > 0 || told.high < 0;
  return h("span", { class: clear ? "clear" : null }, `${signed(told.mean)} [${signed(told.low)}, ${signed(told.high)}]`);
}
