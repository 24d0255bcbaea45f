// The model as it is beside α times the steering, under the same random numbers; and what α buys and costs.

import { lines } from "/studio/charts.js";
import { h, show } from "/studio/dom.js";
import { figure, oneLine } from "/studio/format.js";
import { tintedText } from "/studio/tokens.js";

export function strengthView(section, store, actions) {
  const slider = h("input", { type: "range", id: "alpha", min: 0, max: 2, step: 0.1, value: 1, data: { testid: "alpha" } });
  const shown = h("output", { for: "alpha" }, "1.0");
  const again = h("button", { type: "button", class: "quiet", data: { testid: "other-noise" }, on: { click: () => actions.sampleAgain(Number(slider.value), true) } }, "Other random numbers");
  const measure = h("button", { type: "button", class: "quiet", data: { testid: "curve" }, on: { click: () => actions.curve() } }, "Measure strengths from 0 to 2");
  const whose = h("p", { class: "note", dir: "auto" });
  const pair = h("div", { class: "pair", data: { testid: "pair" } });
  const curve = h("div", { class: "charts", data: { testid: "curve-charts" } });
  show(section,
    h("h2", { id: "strength-title" }, "With and without steering, under the same random numbers"),
    whose,
    h("div", { class: "row alpha" }, h("label", { for: "alpha" }, "Strength α"), slider, shown, again),
    pair, h("div", { class: "row" }, measure), curve);

  let waiting = 0;
  slider.addEventListener("input", () => {
    show(shown, Number(slider.value).toFixed(1));
    clearTimeout(waiting);
    waiting = setTimeout(() => actions.sampleAgain(Number(slider.value), false), 250);
  });

  store.on(["source", "model", "pair", "curve"], ({ source, model, pair: drawn, curve: measured }) => {
    section.hidden = source === null || model === null;
    show(whose, source?.steering ? `The steering "${source.steering}", on: ${oneLine(source.prompt)}` : "");
    measure.disabled = measured === "asked";
    if (drawn && !drawn.waiting) {
      slider.value = drawn.strength;
      show(shown, drawn.strength.toFixed(1));
    }
  });

  store.on(["pair"], ({ pair: drawn }) => {
    if (drawn === null) return show(pair);
    pair.classList.toggle("waiting", drawn.waiting === true);
    if (!drawn.reference) return show(pair, h("p", { class: "empty" }, drawn.problem ?? "Sampling…"));
    const parted = drawn.steered.parts_at;
    pair.dataset.parted = parted === null ? "never" : parted;
    pair.dataset.strength = drawn.strength;
    const column = (title, answer, note) => h("article", {}, h("h3", {}, title), note,
      tintedText({ pieces: answer.pieces, nats: answer.token_kl, label: title, parted }));
    const said = (answer, nats) => h("p", { class: "note" }, [answer.reward === null ? null : `reward ${figure(answer.reward)}`, nats === null ? null : `${figure(nats)} nats per token`].filter(Boolean).join(" · "));
    return show(pair,
      column("The model as it is", drawn.reference, said(drawn.reference, null)),
      column(`Steered, α = ${drawn.strength.toFixed(1)}`, drawn.steered, said(drawn.steered, drawn.kl_per_token)),
      h("p", { class: "note wide" }, parted === null ? "Both say the same." : `They part at token ${parted + 1}, which is underlined.`));
  });

  store.on(["curve"], ({ curve: measured }) => {
    if (measured === null) return show(curve);
    if (measured === "asked") return show(curve, h("p", { class: "empty" }, "Sampling at six strengths…"));
    const at = (name) => measured.map((row) => [row.strength, row[name]]);
    const figures = [
      lines({ label: "Mean reward by strength", series: [{ name: "mean", points: at("reward") }], xLabel: "α", yLabel: "mean reward", xRange: [0, 2] }),
      lines({ label: "KL by strength", series: [{ name: "kl", points: at("kl_per_token") }], xLabel: "α", yLabel: "nats per token", xRange: [0, 2], zero: true }),
    ];
    return show(curve, figures.map((svg) => h("figure", {}, svg)));
  });
}
