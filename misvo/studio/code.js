// A run as code that makes it again. No document here.

/** A value as Python writes it. */
export function python(value) {
  if (value === null || value === undefined) return "None";
  if (value === true) return "True";
  if (value === false) return "False";
  if (Array.isArray(value)) return `[${value.map(python).join(", ")}]`;
  if (typeof value === "object") return `{${Object.entries(value).map(([key, held]) => `${python(key)}: ${python(held)}`).join(", ")}}`;
  // JSON's escapes are Python's, but for code points beyond \uFFFF, which JSON writes as they are.
  return JSON.stringify(value);
}

const OPENAI = { max_new_tokens: "max_tokens", seed: "seed", temperature: "temperature", top_p: "top_p", stop: "stop" };

/** With the openai package, against this server. `body` is what POST /misvo/v1/runs takes. */
export function asPython(body, model, origin) {
  const { prompt, ...rest } = body;
  const messages = typeof prompt === "string" ? [{ role: "user", content: prompt }] : prompt;
  const beside = [];
  const misvo = {};
  for (const [name, held] of Object.entries(rest)) {
    if (name in OPENAI) beside.push(`    ${OPENAI[name]}=${python(held)},`);
    else if (name !== "held_out" && name !== "raw") misvo[name] = held;
  }
  return [
    "from openai import OpenAI",
    "",
    `client = OpenAI(base_url=${python(`${origin}/v1`)}, api_key="none", timeout=3600, max_retries=0)`,
    "answer = client.chat.completions.create(",
    `    model=${python(model)},`,
    `    messages=${python(messages)},`,
    ...beside,
    `    extra_body={"misvo": ${python(misvo)}},`,
    ")",
    "print(answer.choices[0].message.content)",
    'print(answer.misvo["answers"][0])',
    "",
  ].join("\n");
}

/** For a shell; single quotes are closed, escaped and opened again. */
export function asCurl(body, origin) {
  const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;
  return `curl ${quoted(`${origin}/misvo/v1/runs`)} -H 'Content-Type: application/json' -d ${quoted(JSON.stringify(body))}\n`;
}
