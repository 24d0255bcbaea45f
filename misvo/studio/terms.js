// Parts of a reward: from what is typed to what a request says, and back. No document here.

const LISTS = ["contains", "avoids"];
const WHOLE = ["length", "repetition", "overlength"];

/** A term of the request. `kind` is "name" with the name as argument, or one of the kinds that may be declared. */
export function termBody({ kind, argument, weight }) {
  const body = { [kind]: value(kind, argument.trim()) };
  if (weight !== 1) body.weight = weight;
  return body;
}

function value(kind, text) {
  if (LISTS.includes(kind)) {
    const phrases = text.split(",").map((phrase) => phrase.trim()).filter(Boolean);
    if (!phrases.length) throw new Error(`"${kind}" wants words or phrases, with commas between them.`);
    return phrases;
  }
  if (WHOLE.includes(kind)) {
    if (!/^\d{1,6}$/.test(text)) throw new Error(`"${kind}" wants a whole number.`);
    return Number(text);
  }
  if (kind === "json") {
    if (!text) return true;
    try {
      return JSON.parse(text);
    } catch {
      throw new Error("the schema of \"json\" is not JSON.");
    }
  }
  if (!text) throw new Error(kind === "name" ? "choose a reward." : `"${kind}" wants a text.`);
  return text;
}

/** The whole reward: one term, or their sum. */
export function rewardBody(terms) {
  const bodies = terms.map(termBody);
  return bodies.length === 1 ? bodies[0] : bodies;
}

/** What a request said, as it is typed. */
export function typedTerms(reward) {
  return (Array.isArray(reward) ? reward : [reward]).map((term) => {
    if (typeof term === "string") {
      const [, kind, argument] = term.match(/^(\w+):(.*)$/s) ?? [null, "name", term];
      return { kind, argument, weight: 1 };
    }
    const kind = Object.keys(term).find((key) => !["weight", "label"].includes(key) && term[key] !== null);
    const given = term[kind];
    const argument = Array.isArray(given) ? given.join(", ") : given === true ? "" : typeof given === "object" ? JSON.stringify(given) : String(given);
    return { kind, argument, weight: term.weight ?? 1 };
  });
}

/** A reward in a few words. */
export function rewardName(reward) {
  if (reward === null || reward === undefined) return "";
  return typedTerms(reward).map(({ kind, argument, weight }) => {
    const name = kind === "name" ? argument : argument ? `${kind}: ${argument}` : kind;
    return weight === 1 ? name : `${weight} × ${name}`;
  }).join(" + ");
}
