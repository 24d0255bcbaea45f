// The form: a prompt or a conversation, a reward made of parts, the settings; and what can be started from it.

import { field, h, show } from "/studio/dom.js";
import { count } from "/studio/format.js";
import { rewardEditor } from "/studio/reward_editor.js";
import { settingsEditor } from "/studio/settings_editor.js";
import { rewardBody } from "/studio/terms.js";

const EXAMPLE = "Give me one tip for sleeping better.";
const ROLES = ["system", "user", "assistant"];

/** Builds the form. `actions`: start(body), cancel(), copy(kind, body). Gives {fill(body), refresh(state)}. */
export function askForm(form, { state, actions }) {
  const prompt = h("textarea", { rows: 3, name: "prompt", value: EXAMPLE, required: true, dir: "auto", data: { testid: "prompt" } });
  const messages = conversation();
  const chat = h("input", { type: "checkbox", name: "chat", role: "switch" });
  const one = field("Prompt", prompt);
  const many = h("div", { hidden: true }, messages.element);
  const reward = rewardEditor(state.rewards, "Reward");
  const heldOut = rewardEditor(state.rewards, "Held-out reward", { optional: true });
  const settings = settingsEditor(state);
  const problem = h("p", { class: "problem", role: "alert", hidden: true });
  const steer = h("button", { class: "main", type: "submit", data: { testid: "steer" } }, "Steer");
  const cancel = h("button", { type: "button", class: "danger", hidden: true, data: { testid: "cancel" }, on: { click: actions.cancel } }, "Cancel");
  const cost = h("p", { class: "cost" });

  chat.addEventListener("change", () => {
    if (chat.checked) messages.set([{ role: "system", content: "" }, { role: "user", content: prompt.value }]);
    else prompt.value = messages.get().findLast((message) => message.role === "user")?.content ?? prompt.value;
    one.hidden = chat.checked;
    many.hidden = !chat.checked;
  });

  /** What POST /misvo/v1/runs takes; an Error says what is missing. */
  function body() {
    const said = chat.checked ? messages.get().filter((message) => message.content.trim() || message.role === "user") : prompt.value;
    const last = typeof said === "string" ? said : said.at(-1)?.content ?? "";
    if (!last.trim()) throw new Error("write a prompt first.");
    const made = { prompt: said, reward: rewardBody(reward.terms()), ...settings.values() };
    const held = heldOut.terms();
    if (held.length) made.held_out = rewardBody(held);
    return made;
  }

  function attempt(action) {
    try {
      problem.hidden = true;
      action(body());
    } catch (error) {
      problem.hidden = false;
      show(problem, sentence(error.message));
    }
  }

  function estimate() {
    const { rollouts, steps, max_new_tokens: length } = settings.sizes();
    show(cost, `${count(rollouts * steps, "response")} of up to ${count(length, "token")}`);
  }

  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (!steer.disabled) attempt(actions.start);
  });
  form.addEventListener("input", estimate);
  const copies = ["Python", "curl"].map((kind) =>
    h("button", { type: "button", class: "quiet", data: { testid: `copy-${kind.toLowerCase()}` }, on: { click: () => attempt((made) => actions.copy(kind, made)) } }, `Copy as ${kind}`));
  show(form,
    h("section", { class: "card" },
      one, many,
      h("label", { class: "switch" }, chat, "A conversation with system message and history"),
      reward.element,
      h("div", { class: "go" }, steer, cancel, cost),
      problem),
    h("details", { class: "card", open: false, data: { testid: "settings" } },
      h("summary", {}, "Settings"),
      settings.element,
      h("fieldset", {}, h("legend", {}, "Honesty"), h("p", { class: "note" }, "A reward that is watched and not optimised: it shows when the other one is gamed."), heldOut.element),
      h("div", { class: "row" }, copies)));
  estimate();

  return {
    fill(given) {
      chat.checked = typeof given.prompt !== "string";
      one.hidden = chat.checked;
      many.hidden = !chat.checked;
      if (chat.checked) messages.set(given.prompt);
      else prompt.value = given.prompt;
      if (given.reward) reward.set(given.reward);
      heldOut.set(given.held_out ?? []);
      settings.fill(given);
      estimate();
    },
    refresh({ busy, connected }) {
      steer.disabled = busy || !connected;
      steer.hidden = busy;
      cancel.hidden = !busy;
    },
    prompt: () => (chat.checked ? messages.get() : prompt.value),
    complain(message) {
      problem.hidden = !message;
      show(problem, message ? sentence(message) : "");
    },
  };
}

const sentence = (text) => text.charAt(0).toUpperCase() + text.slice(1);

function conversation() {
  const list = h("div", { class: "messages", role: "group", "aria-label": "Conversation" });
  const add = (role, content = "") => {
    const who = h("select", { "aria-label": "Who speaks" }, ROLES.map((name) => h("option", { value: name }, name)));
    who.value = role;
    const text = h("textarea", { rows: role === "system" ? 2 : 3, value: content, dir: "auto", "aria-label": "What is said" });
    const away = h("button", { type: "button", class: "quiet", "aria-label": "Remove this message", on: { click: () => list.childElementCount > 1 && row.remove() } }, "×");
    const row = h("div", { class: "message" }, who, away, text);
    list.append(row);
  };
  const more = h("button", { type: "button", class: "quiet", on: { click: () => add(list.childElementCount % 2 ? "user" : "assistant") } }, "+ message");
  return {
    element: h("div", {}, list, more),
    get: () => [...list.children].map((row) => ({ role: row.querySelector("select").value, content: row.querySelector("textarea").value })),
    set(messages) {
      show(list);
      for (const message of messages) add(message.role, message.content);
    },
  };
}
