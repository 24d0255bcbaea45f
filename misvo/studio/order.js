// How responses are sorted: what is not known comes last, whichever way; equals stay as they were sampled. No document here.

const value = (candidate, name) => (name.startsWith("parts.") ? candidate.parts?.[name.slice(6)] : candidate[name]) ?? null;

export function by(name, down) {
  const sign = down ? -1 : 1;
  return (a, b) => {
    const [left, right] = [value(a, name), value(b, name)];
    if (left === null || right === null) return (left === null) - (right === null);
    const order = typeof left === "string" ? left.localeCompare(right) : left - right;
    return sign * order || a.step - b.step || a.rollout - b.rollout;
  };
}
