// How the run goes: reward and KL by step, how long it will take, what the engine does meanwhile.

import { lines } from "/studio/charts.js";
import { h, show } from "/studio/dom.js";
import { count, duration, figure, oneLine } from "/studio/format.js";
import { over } from "/studio/state.js";
import { rewardName } from "/studio/terms.js";

const STATES = { queued: "waiting", in_progress: "running", completed: "done", failed: "failed", cancelled: "cancelled" };

export function liveView(section, store) {
  const badge = h("span", { class: "badge", data: { testid: "run-state" } });
  const title = h("h2", { id: "live-title", dir: "auto" });
  const toward = h("p", { class: "note", dir: "auto" });
  const bar = h("progress", { max: 1, value: 0, "aria-label": "Steps done" });
  const figures = h("dl", { class: "figures" });
  const reward = h("figure", {});
  const kl = h("figure", {});
  const note = h("p", { class: "note", data: { testid: "run-note" }, hidden: true });
  show(section, h("div", { class: "head" }, title, badge), toward, bar, figures, h("div", { class: "charts" }, reward, kl), note);

  store.on(["run"], ({ run }) => {
    section.hidden = run === null;
    if (run === null) return;
    badge.dataset.state = run.state;
    show(badge, STATES[run.state] ?? run.state);
    show(title, oneLine(run.prompt));
    show(toward, `toward ${rewardName(run.request?.reward) || "its reward"}`);
  });

  store.on(["run", "rows", "status", "left"], ({ run, rows, status, left }) => {
    if (run === null) return;
    const steps = run.settings.steps;
    bar.max = steps;
    bar.value = rows.length;
    const last = rows.at(-1);
    const facts = [["step", `${rows.length} of ${steps}`], ["mean reward", figure(last?.mean)], ["highest", figure(last?.best)]];
    if (over(run)) facts.push(["time", duration(run.seconds)]);
    else facts.push(["time left", last ? duration(left) : "…"], ["rows in flight", status ? status.rows_in_flight : "…"], ["tokens per second", status ? figure(status.tokens_per_second, 0) : "…"]);
    show(figures, facts.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", { data: { fact: name } }, String(value)))));
  });

  store.on(["run", "rows"], ({ run, rows }) => {
    if (run === null) return;
    const xRange = [1, Math.max(2, run.settings.steps)];
    const at = (name) => rows.map((row) => [row.step + 1, row[name]]);
    const held = rows.some((row) => Number.isFinite(row.held_out)) ? [{ name: "held-out", points: at("held_out") }] : [];
    drawing(reward, "Reward", rows.length ? lines({
      label: summary(rows), xLabel: "step", yLabel: "reward", xRange,
      series: [{ name: "best", points: at("best"), dots: false }, { name: "max", points: at("max") }, { name: "mean", points: at("mean") }, ...held],
    }) : null, [["mean", "mean of the step"], ["max", "highest of the step"], ["best", "highest so far"], ...(held.length ? [["held-out", "held-out, mean"]] : [])]);
    const budget = run.budget?.per_token ?? run.settings.kl_budget_per_token ?? null;
    drawing(kl, "How far the model was moved", rows.length ? lines({
      label: `KL by step, in nats per token: ${rows.map((row) => figure(row.kl_per_token)).join(", ")}`, xLabel: "step", yLabel: "nats per token", xRange, zero: true,
      series: [{ name: "kl", points: at("kl_per_token") }], rule: budget ? { y: budget, name: "budget" } : null,
    }) : null, [["kl", "KL to the model as it was"]]);
    const said = run.error?.message ?? rows.findLast((row) => row.note)?.note;
    note.hidden = !said;
    show(note, said ?? "");
  });
}

function drawing(figureElement, title, svg, names) {
  show(figureElement, h("figcaption", {}, h("b", {}, title), names.map(([series, name]) => h("span", { class: `key series-${series}` }, name))),
    svg ?? h("p", { class: "empty" }, "The first step is being sampled…"));
}

function summary(rows) {
  const [first, last] = [rows[0], rows.at(-1)];
  return `Reward by step: the mean went from ${figure(first.mean)} to ${figure(last.mean)} in ${count(rows.length, "step")}; the highest is ${figure(last.best)}.`;
}
