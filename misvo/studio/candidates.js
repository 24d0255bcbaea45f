// Every response of the run: a table that sorts, a picture of reward against KL, and two of them word by word.
// Of a long table only the rows in sight are made.

import { scatter } from "/studio/charts.js";
import { diff } from "/studio/diff.js";
import { h, show } from "/studio/dom.js";
import { figure, oneLine } from "/studio/format.js";
import { by } from "/studio/order.js";
import { keyOf, over } from "/studio/state.js";

const ROW = 34; // pixels, as in the style sheet
const SPARE = 6; // rows beyond those in sight
const DOTS = 1000; // of the picture

const COLUMNS = [
  { name: "step", title: "Step", show: (c) => c.step + 1 },
  { name: "reward", title: "Reward", show: (c) => (c.reward === null ? "not scored" : figure(c.reward)) },
  { name: "held_out", title: "Held out", show: (c) => figure(c.held_out), optional: true },
  { name: "kl_per_token", title: "KL/token", show: (c) => figure(c.kl_per_token) },
  { name: "fluency", title: "Fluency", show: (c) => figure(c.fluency, 2), optional: true },
  { name: "ref_logprob", title: "Likelihood", show: (c) => figure(c.ref_logprob, 2), about: "nats per token under the model as it is" },
  { name: "diversity", title: "Diversity", show: (c) => figure(c.diversity, 2), optional: true },
  { name: "text", title: "Text", show: (c) => oneLine(c.text, 240), wide: true },
];

export function candidatesView(section, store, actions) {
  let order = { name: "reward", down: true };
  let rows = [];
  let columns = [];
  const made = new Map(); // candidate -> its line
  const title = h("h2", { id: "candidates-title" });
  const header = h("div", { class: "line header", role: "row", "aria-rowindex": 1 });
  const inner = h("div", { class: "lines" });
  const box = h("div", { class: "scroll", tabindex: 0, "aria-label": "Responses", role: "rowgroup", on: { scroll: () => requestAnimationFrame(paint) } }, inner);
  const table = h("div", { role: "table", "aria-labelledby": "candidates-title", class: "table", data: { testid: "table" } }, h("div", { role: "rowgroup" }, header), box);
  const dots = h("figure", {});
  const compared = h("div", { class: "compared", data: { testid: "compared" }, "aria-live": "polite" });
  const help = h("p", { class: "note" }, "Click a response to read it above; tick two to compare them.");
  const judge = h("button", { type: "button", class: "quiet", hidden: true, on: { click: () => actions.fluency() } }, "Judge their fluency");
  show(section, h("div", { class: "head" }, title, judge), help, table, compared, h("details", { data: { testid: "scatter" }, on: { toggle: draw } }, h("summary", {}, "Reward against KL"), dots));

  function head() {
    const known = store.state.candidates;
    columns = COLUMNS.filter((column) => !column.optional || known.some((c) => c[column.name] !== null && c[column.name] !== undefined));
    const parts = [...new Set(known.flatMap((c) => Object.keys(c.parts ?? {})))].map((part) => ({ name: `parts.${part}`, title: part, show: (c) => figure(c.parts?.[part]) }));
    columns.splice(2, 0, ...(parts.length > 1 ? parts : []));
    table.style.setProperty("--columns", columns.map((column) => (column.wide ? "minmax(12rem, 1fr)" : "6rem")).join(" "));
    show(header, h("span", { role: "columnheader" }, h("span", { class: "unseen" }, "compare")), columns.map((column) => h("span", {
      role: "columnheader", "aria-sort": order.name === column.name ? (order.down ? "descending" : "ascending") : "none", class: column.wide ? "wide" : "number", title: column.about,
    }, h("button", { type: "button", data: { sort: column.name }, on: { click: () => sort(column.name) } }, column.title, order.name === column.name ? (order.down ? " ↓" : " ↑") : ""))));
  }

  function sort(name) {
    order = { name, down: order.name === name ? !order.down : name !== "text" && name !== "step" };
    arrange();
    box.scrollTop = 0;
    paint();
  }

  function arrange() {
    rows = [...store.state.candidates].sort(by(order.name, order.down));
    for (const element of made.values()) element.remove();
    made.clear();
    section.dataset.sort = `${order.name} ${order.down ? "down" : "up"}`;
    head();
    inner.style.height = `${rows.length * ROW}px`;
    table.setAttribute("aria-rowcount", rows.length + 1);
  }

  /** Make the lines in sight. A line that is there already stays, and so does the focus in it. */
  function paint() {
    const first = Math.max(0, Math.floor(box.scrollTop / ROW) - SPARE);
    const last = Math.min(rows.length, Math.ceil((box.scrollTop + box.clientHeight) / ROW) + SPARE);
    const wanted = new Map(rows.slice(first, last).map((candidate, i) => [candidate, first + i]));
    for (const [candidate, element] of made) {
      if (wanted.get(candidate) === Number(element.dataset.index)) continue;
      element.remove();
      made.delete(candidate);
    }
    for (const [candidate, index] of wanted) {
      if (made.has(candidate)) continue;
      const element = line(candidate, index);
      made.set(candidate, element);
      inner.append(element);
    }
    mark();
  }

  /** Which lines are ticked, returned and read. */
  function mark() {
    const { picked, run, detail } = store.state;
    for (const element of made.values()) {
      const { key } = element.dataset;
      element.classList.toggle("returned", Boolean(run?.answer) && keyOf(run.answer) === key);
      element.classList.toggle("read", detail !== null && keyOf(detail) === key);
      element.querySelector("input").checked = picked.includes(key);
    }
  }

  function line(candidate, index) {
    const key = keyOf(candidate);
    const tick = h("input", { type: "checkbox", "aria-label": `Compare response ${candidate.rollout + 1} of step ${candidate.step + 1}`, on: { change: () => actions.pick(key) } });
    const element = h("div", { class: "line", role: "row", "aria-rowindex": index + 2, data: { key, index } },
      h("span", { role: "cell" }, tick), columns.map((column) => h("span", { role: "cell", class: column.wide ? "wide" : "number", data: { column: column.name }, dir: column.wide ? "auto" : null },
        column.wide ? h("button", { type: "button", class: "text", on: { click: () => actions.read(candidate) } }, String(column.show(candidate))) : String(column.show(candidate)))));
    element.style.top = `${index * ROW}px`;
    return element;
  }

  function draw() {
    const { candidates, run, picked } = store.state;
    if (!dots.parentElement.open || !run) return;
    const known = candidates.filter((c) => Number.isFinite(c.reward) && Number.isFinite(c.kl_per_token)).slice(-DOTS);
    if (!known.length) return;
    show(dots, scatter({
      label: `Reward against KL of ${known.length} responses`, xLabel: "nats per token", yLabel: "reward", onPick: (key) => actions.read(candidates.find((c) => keyOf(c) === key)),
      points: known.map((c) => ({ x: c.kl_per_token, y: c.reward, key: keyOf(c), group: c.step / Math.max(1, run.settings.steps - 1), picked: picked.includes(keyOf(c)) })),
    }), h("figcaption", {}, h("span", { class: "key early" }, "first steps"), h("span", { class: "key late" }, "last steps")));
  }

  store.on(["candidates"], ({ candidates }) => {
    section.hidden = !candidates.length;
    const unscored = candidates.filter((c) => c.reward === null).length;
    show(title, `All ${candidates.length} responses${unscored ? `, ${unscored} of them not scored` : ""}`);
    arrange();
    paint();
    draw();
  });
  store.on(["picked", "run", "detail"], mark);
  store.on(["candidates", "run"], ({ candidates, run }) => {
    judge.hidden = !(over(run) && run.has_judge) || candidates.some((c) => Number.isFinite(c.fluency));
  });
  store.on(["picked", "candidates"], ({ picked, candidates }) => {
    const chosen = picked.map((key) => candidates.find((c) => keyOf(c) === key)).filter(Boolean);
    show(compared, chosen.length === 2 ? comparison(...chosen) : chosen.length === 1 ? h("p", { class: "note" }, "Tick another response to compare.") : null);
  });
}

/** Two responses word by word: what only one of them has is marked. */
function comparison(left, right) {
  const parts = diff(left.text, right.text);
  const column = (candidate, kind) => h("article", {}, h("h3", {}, `Step ${candidate.step + 1}, response ${candidate.rollout + 1}`),
    h("p", { class: "note" }, `${candidate.reward === null ? "not scored" : `reward ${figure(candidate.reward)}`} · ${figure(candidate.kl_per_token)} nats per token`),
    h("div", { class: "tokens", dir: "auto" }, parts.filter((part) => part.kind === "same" || part.kind === kind).map((part) => (part.kind === "same" ? part.text : h("mark", { class: kind, data: { kind } }, part.text)))));
  return h("div", { class: "pair" }, column(left, "left"), column(right, "right"));
}
