// Small drawings: lines over steps, bars over positions, points. Colours come from the style sheet, by class.

import { s } from "/studio/dom.js";
import { figure } from "/studio/format.js";
import { extent, linear, rounded, ticks } from "/studio/scale.js";

const WIDTH = 460;
const HEIGHT = 200;
const BOX = { left: 46, right: 12, top: 10, bottom: 32 };

function frame(label, xRange, yRange, xLabel, yLabel, xTicks) {
  const x = linear(xRange, [BOX.left, WIDTH - BOX.right]);
  const y = linear(yRange, [HEIGHT - BOX.bottom, BOX.top]);
  const grid = ticks(yRange).map((value) => [
    s("line", { class: "grid", x1: BOX.left, x2: WIDTH - BOX.right, y1: y(value), y2: y(value) }),
    s("text", { class: "tick", x: BOX.left - 6, y: y(value) + 4, "text-anchor": "end" }, short(value)),
  ]);
  const below = xTicks.map((value) => s("text", { class: "tick", x: x(value), y: HEIGHT - BOX.bottom + 15, "text-anchor": "middle" }, short(value)));
  const names = [
    s("text", { class: "axis", x: (BOX.left + WIDTH - BOX.right) / 2, y: HEIGHT - 3, "text-anchor": "middle" }, xLabel),
    s("text", { class: "axis", x: 0, y: 0, transform: `translate(10 ${(BOX.top + HEIGHT - BOX.bottom) / 2}) rotate(-90)`, "text-anchor": "middle" }, yLabel),
  ];
  const svg = s("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": label, class: "chart" }, grid, below, names);
  return { svg, x, y };
}

const short = (value) => Number(value.toPrecision(4)).toString().replace("-", "−");

/** Lines over whole numbers. series: [{name, points: [[x, y]], dots}]; rule: {y, name}, a line to keep below. */
export function lines({ label, series, xLabel, yLabel, xRange, rule = null, zero = false }) {
  const values = series.flatMap(({ points }) => points.map(([, value]) => value));
  if (rule) values.push(rule.y);
  if (zero) values.push(0);
  const range = rounded(extent(values));
  const { svg, x, y } = frame(label, xRange, range, xLabel, yLabel, ticks(xRange, 6));
  if (rule) {
    svg.append(
      s("line", { class: "rule", x1: BOX.left, x2: WIDTH - BOX.right, y1: y(rule.y), y2: y(rule.y), "data-budget": rule.y }),
      s("text", { class: "rule-name", x: BOX.left + 4, y: y(rule.y) - 5 }, rule.name),
    );
  }
  for (const { name, points, dots = true } of series) {
    const known = points.filter(([, value]) => Number.isFinite(value));
    const path = known.map(([at, value], i) => `${i ? "L" : "M"}${x(at).toFixed(1)} ${y(value).toFixed(1)}`).join("");
    svg.append(s("path", { class: `line series-${name}`, d: path, "data-series": name, "data-points": known.length }));
    if (dots) {
      svg.append(...known.map(([at, value]) => s("circle", { class: `dot series-${name}`, cx: x(at), cy: y(value), r: 3 },
        s("title", {}, `${name}, ${xLabel} ${at}: ${figure(value)}`))));
    }
  }
  return svg;
}

/** A bar for each position, as high as its KL. `onPick(position)` hears of clicks. */
export function strip({ label, values, picked, onPick }) {
  const height = 56;
  const most = Math.max(0.1, ...values);
  const width = Math.max(1, values.length);
  const bars = values.map((value, place) => {
    const tall = Math.max(1, (Math.max(0, value) / most) * (height - 4));
    return s("rect", {
      class: place === picked ? "bar picked" : "bar", x: place + 0.08, width: 0.84, y: height - tall, height: tall, "data-place": place,
      on: { click: () => onPick(place), mouseenter: () => onPick(place) },
    }, s("title", {}, `position ${place + 1}: ${figure(value)} nats`));
  });
  return s("svg", { viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: "none", class: "strip", role: "img", "aria-label": label }, bars);
}

/** Points; `group` from 0 to 1 tints them from early to late. points: [{x, y, key, title, group, picked}] */
export function scatter({ label, points, xLabel, yLabel, onPick }) {
  const xRange = rounded(extent(points.map((point) => point.x)));
  const yRange = rounded(extent(points.map((point) => point.y)));
  const { svg, x, y } = frame(label, xRange, yRange, xLabel, yLabel, ticks(xRange, 5));
  const marks = s("g", { on: { click: (event) => event.target.dataset.key && onPick(event.target.dataset.key) } }, points.map((point) =>
    s("circle", {
      class: point.picked ? "mark picked" : "mark", cx: x(point.x).toFixed(1), cy: y(point.y).toFixed(1), r: point.picked ? 5 : 3,
      data: { key: point.key }, vars: { late: point.group.toFixed(2) },
    })));
  svg.append(marks);
  return svg;
}
