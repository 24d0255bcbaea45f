// Numbers and times as people read them. No document here: `node --test` runs this file.

/** A number in few digits; what is not known is a dash, never 0. */
export function figure(value, digits = 3) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (!Number.isFinite(value)) return value > 0 ? "∞" : "−∞";
  const size = Math.abs(value);
  const text = size !== 0 && (size < 0.001 || size >= 1e6) ? value.toExponential(1)
    : size >= 100 ? value.toFixed(0) : size >= 10 ? value.toFixed(1) : value.toFixed(digits);
  return text.replace("-", "−");
}

/** The same with its sign. */
export function signed(value, digits = 3) {
  const text = figure(value, digits);
  return value > 0 ? `+${text}` : text;
}

export function percent(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const share = 100 * value;
  return share !== 0 && Math.abs(share) < 0.1 ? "<0.1 %" : `${share.toFixed(share < 10 ? 1 : 0)} %`;
}

export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 1) return "under a second";
  if (seconds < 100) return `${Math.round(seconds)} s`;
  const minutes = Math.round(seconds / 60);
  return minutes < 100 ? `${minutes} min` : `${(seconds / 3600).toFixed(1)} h`;
}

export function count(number, one, many = `${one}s`) {
  return `${number} ${number === 1 ? one : many}`;
}

/** 134515008 → 135M */
export function size(number) {
  if (!number) return "";
  const [unit, name] = number >= 1e9 ? [1e9, "B"] : number >= 1e6 ? [1e6, "M"] : [1, ""];
  return `${(number / unit).toPrecision(3).replace(/\.0+$/, "")}${name}`;
}

/** A prompt in one line, be it a text or messages. */
export function oneLine(prompt, most = 80) {
  const last = typeof prompt === "string" ? prompt : prompt.findLast((message) => message.role === "user")?.content ?? "";
  const text = last.replace(/\s+/g, " ").trim();
  return text.length > most ? `${text.slice(0, most - 1)}…` : text;
}
