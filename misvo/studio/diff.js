// Where two texts differ, word by word. No document here.

const MOST = 1200; // words: beyond it, texts are compared as two blocks

export function words(text) {
  return text.match(/\s+|[\p{L}\p{N}'’]+|[^\s\p{L}\p{N}]/gu) ?? [];
}

/** [{kind: "same" | "left" | "right", text}], by the longest common subsequence of words. */
export function diff(left, right) {
  const [a, b] = [words(left), words(right)];
  if (a.length > MOST || b.length > MOST) return join([["left", left], ["right", right]]);
  const width = b.length + 1;
  const common = new Uint16Array((a.length + 1) * width); // of the words from i and j on
  for (let i = a.length - 1; i >= 0; i -= 1) {
    for (let j = b.length - 1; j >= 0; j -= 1) {
      common[i * width + j] = a[i] === b[j]
        ? common[(i + 1) * width + j + 1] + 1
        : Math.max(common[(i + 1) * width + j], common[i * width + j + 1]);
    }
  }
  const parts = [];
  let [i, j] = [0, 0];
  while (i < a.length || j < b.length) {
    if (i < a.length && j < b.length && a[i] === b[j]) {
      parts.push(["same", a[i]]);
      i += 1;
      j += 1;
    } else if (j >= b.length || (i < a.length && common[(i + 1) * width + j] >= common[i * width + j + 1])) {
      parts.push(["left", a[i]]);
      i += 1;
    } else {
      parts.push(["right", b[j]]);
      j += 1;
    }
  }
  return join(parts);
}

function join(parts) {
  const joined = [];
  for (const [kind, text] of parts) {
    const last = joined.at(-1);
    if (last?.kind === kind) last.text += text;
    else joined.push({ kind, text });
  }
  return joined;
}
