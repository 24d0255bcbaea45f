// From values to places and tints. No document here.

/** From a range of values to a range of places. */
export function linear([low, high], [from, to]) {
  const span = high - low || 1;
  return (value) => from + ((value - low) / span) * (to - from);
}

/** The least and the greatest of some values that are known, a little apart where they are equal. */
export function extent(values) {
  const known = values.filter((value) => Number.isFinite(value));
  if (!known.length) return [0, 1];
  let [low, high] = [Infinity, -Infinity];
  for (const value of known) {
    if (value < low) low = value;
    if (value > high) high = value;
  }
  if (low === high) return [low - Math.max(0.5, Math.abs(low) / 10), high + Math.max(0.5, Math.abs(high) / 10)];
  return [low, high];
}

/** 1, 2 or 5 times a power of ten: the distance of about `count` round numbers between two. */
function stride(low, high, count) {
  const rough = (high - low) / Math.max(1, count);
  const power = 10 ** Math.floor(Math.log10(rough));
  return power * ([1, 2, 5].find((factor) => factor * power >= rough * (1 - 1e-9)) ?? 10);
}

/** About `count` round numbers that cover a range. */
export function ticks([low, high], count = 4) {
  const step = stride(low, high, count);
  const first = Math.ceil(low / step - 1e-9);
  const last = Math.floor(high / step + 1e-9);
  return Array.from({ length: Math.max(0, last - first + 1) }, (_, i) => Number(((first + i) * step).toPrecision(12)));
}

/** A range that ends on round numbers. */
export function rounded([low, high], count = 4) {
  const step = stride(low, high, count);
  return [Math.floor(low / step + 1e-9) * step, Math.ceil(high / step - 1e-9) * step];
}

const WARM = 0.4; // nats at which a token is tinted by two thirds, here as in the terminal

/** How strongly a token is tinted where the model was moved so far, from 0 to 1. */
export function tint(nats) {
  return Number.isFinite(nats) ? 1 - Math.exp(-Math.max(0, nats) / WARM) : 0;
}
