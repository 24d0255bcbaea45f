// The answer, tinted by nats; for the token under the mouse, what was promoted and what was demoted there.

import { strip } from "/studio/charts.js";
import { h, show } from "/studio/dom.js";
import { count, figure, percent } from "/studio/format.js";
import { keyOf } from "/studio/state.js";
import { legend, tintedText } from "/studio/tokens.js";

export function answerView(section, store, actions) {
  const title = h("h2", { id: "answer-title" });
  const facts = h("p", { class: "note", data: { testid: "answer-facts" } });
  const story = h("div", { class: "story", data: { testid: "story" } });
  const body = h("div", { class: "answer", data: { testid: "answer-text" } });
  const bars = h("div", { class: "bars" });
  const place = h("div", { class: "moved", "aria-live": "polite", data: { testid: "moved" } });
  const copy = h("button", { type: "button", class: "quiet", on: { click: () => actions.copyText(store.state.detail?.text ?? "") } }, "Copy the text");
  show(section, h("div", { class: "head" }, title, copy), facts, body, legend(), bars, place, story);

  store.on(["detail", "run"], ({ detail, run }) => {
    section.hidden = detail === null;
    if (detail === null || run === null) return;
    const returned = run.answer !== null && keyOf(run.answer) === keyOf(detail);
    show(title, returned ? "The answer" : `Response ${detail.rollout + 1} of step ${detail.step + 1}`);
    section.dataset.key = keyOf(detail);
    show(facts, [
      detail.reward === null ? "not scored" : `reward ${figure(detail.reward)}`,
      `${figure(detail.kl_per_token)} nats per token`,
      count(detail.tokens.length, "token"),
      detail.changed ? `${percent(detail.changed.length / Math.max(1, detail.tokens.length))} of its tokens changed by steering` : null,
      detail.ended === false ? "cut off at its length" : null,
    ].filter(Boolean).join(" · "));
    show(story, returned ? (run.story ?? []).map((sentence) => h("p", {}, sentence)) : []);
  });

  store.on(["detail"], ({ detail }) => {
    if (detail === null) return;
    if (!detail.pieces?.length) {
      show(body, h("div", { class: "tokens", dir: "auto" }, detail.text));
      show(bars);
      show(place);
      return;
    }
    const pick = (at) => {
      show(place, change(detail, at));
      for (const bar of bars.querySelectorAll(".bar")) bar.classList.toggle("picked", Number(bar.dataset.place) === at);
      for (const span of body.querySelectorAll(".token")) span.classList.toggle("picked", Number(span.dataset.place) === at);
    };
    show(body, tintedText({ pieces: detail.pieces, nats: detail.token_kl, label: "The answer, token by token", onPick: pick }));
    show(bars, strip({ label: `KL at each of ${detail.token_kl.length} positions, at most ${figure(Math.max(0, ...detail.token_kl))} nats`, values: detail.token_kl, onPick: pick }));
    pick(detail.token_kl.indexOf(Math.max(...detail.token_kl)));
  });
}

/** What steering did at one position. */
function change(detail, at) {
  const moved = detail.moved?.[at];
  const head = h("p", {}, h("b", {}, `Position ${at + 1}: `), h("q", { class: "piece" }, detail.pieces[at] ?? ""), ` · ${figure(detail.token_kl[at])} nats`,
    moved ? ` · ${percent(moved.before)} → ${percent(moved.after)}` : null);
  if (!moved) return [head, h("p", { class: "note" }, detail.step === 0 ? "The first step is the model as it is: nothing was moved." : "What was promoted here is known for steered responses of a live run.")];
  return [head, h("div", { class: "sides" }, side("Promoted", moved.promoted, "up"), side("Demoted", moved.demoted, "down"))];
}

function side(title, rows, way) {
  if (!rows.length) return h("div", {}, h("h3", {}, title), h("p", { class: "note" }, "none"));
  return h("table", { class: way, data: { way } }, h("caption", {}, title), h("tbody", {}, rows.map(({ token, before, after }) => h("tr", {},
    h("th", { scope: "row" }, h("span", { class: "piece" }, JSON.stringify(token).slice(1, -1))),
    h("td", {}, percent(before)), h("td", { "aria-hidden": "true" }, "→"), h("td", {}, percent(after)),
    h("td", { class: "meter" }, h("i", { vars: { share: after.toFixed(4) } }), h("i", { class: "was", vars: { share: before.toFixed(4) } }))))));
}
