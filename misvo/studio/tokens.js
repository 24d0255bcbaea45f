// A response token by token: tinted by nats, one of them picked by mouse or arrow keys.

import { h } from "/studio/dom.js";
import { figure } from "/studio/format.js";
import { tint } from "/studio/scale.js";

/** pieces: texts of tokens; nats: KL at each. `onPick(place)` hears of the token under the mouse or the focus. */
export function tintedText({ pieces, nats, label, onPick = null, parted = null }) {
  const spans = pieces.map((piece, place) => h("span", {
    class: classes(piece, place, parted), role: onPick ? "button" : null, tabindex: onPick ? (place === 0 ? 0 : -1) : null,
    data: { place, nats: (nats[place] ?? 0).toFixed(4) }, vars: { tint: tint(nats[place]).toFixed(3) },
    "aria-label": onPick ? `${piece.trim() || "blank"}, ${figure(nats[place])} nats` : null,
  }, piece));
  const text = h("div", { class: "tokens", dir: "auto", role: "group", "aria-label": label }, spans);
  if (!onPick) return text;

  const pick = (span) => {
    for (const one of spans) one.classList.toggle("picked", one === span);
    onPick(Number(span.dataset.place));
  };
  const token = (target) => target.closest?.("[data-place]");
  text.addEventListener("mouseover", (event) => token(event.target) && pick(token(event.target)));
  text.addEventListener("click", (event) => token(event.target)?.focus());
  text.addEventListener("focusin", (event) => token(event.target) && pick(token(event.target)));
  text.addEventListener("keydown", (event) => {
    const move = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1, Home: -Infinity, End: Infinity }[event.key];
    const here = spans.indexOf(document.activeElement);
    if (move === undefined || here < 0) return;
    event.preventDefault();
    const next = spans[Math.min(spans.length - 1, Math.max(0, here + move))];
    spans[here].tabIndex = -1;
    next.tabIndex = 0;
    next.focus();
  });
  return text;
}

function classes(piece, place, parted) {
  const names = ["token"];
  if (/^<\|?[\w/ ]+\|?>$/.test(piece)) names.push("special");
  if (place === parted) names.push("parted");
  return names.join(" ");
}

/** What the tints mean. */
export function legend() {
  return h("p", { class: "legend" }, "nats: ", [0, 0.1, 0.3, 1, 3].map((nats) => h("span", { class: "token", vars: { tint: tint(nats).toFixed(3) } }, ` ${nats} `)));
}
