// The page: asks the server what it has, builds the views, and follows its own address (#run=ID).

import { createActions } from "/studio/actions.js";
import { answerView } from "/studio/answer.js";
import { api, onKeyNeeded } from "/studio/api.js";
import { askForm } from "/studio/ask.js";
import { candidatesView } from "/studio/candidates.js";
import { h, show } from "/studio/dom.js";
import { figure, size } from "/studio/format.js";
import { honestyView } from "/studio/honesty.js";
import { liveView } from "/studio/live.js";
import { shelfView } from "/studio/shelf.js";
import { over, store } from "/studio/state.js";
import { strengthView } from "/studio/strength.js";

const find = (id) => document.getElementById(id);
const STATUS_EVERY = 1000; // milliseconds, while a run goes on

function say(text) {
  show(find("said"), text);
}

function askKey() {
  const door = find("door");
  find("door-key").value = "";
  door.showModal();
  return new Promise((done) => {
    door.addEventListener("close", () => done(find("door-key").value), { once: true });
  });
}

function chooseTheme() {
  const root = document.documentElement;
  const kept = localStorage.getItem("misvo-theme");
  if (kept) root.dataset.theme = kept;
  find("theme").addEventListener("click", () => {
    const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = dark ? "light" : "dark";
    localStorage.setItem("misvo-theme", root.dataset.theme);
  });
}

function facts({ model, status }) {
  if (model === null) return show(find("facts"), h("span", {}, "finished runs, no model"));
  return show(find("facts"), h("b", {}, model.name), h("span", {}, [size(model.parameters), model.precision].filter(Boolean).join(" · ")),
    status?.rows_in_flight ? h("span", { data: { fact: "engine" } }, `${status.rows_in_flight} rows · ${figure(status.tokens_per_second, 0)} tok/s`) : null);
}

async function start() {
  chooseTheme();
  find("no-script").hidden = true;
  onKeyNeeded(askKey);
  let form = null;
  const banner = find("banner");
  const actions = createActions(store, {
    say,
    complain: (message) => (form ? form.complain(message) : (banner.hidden = !message, show(banner, message))),
    fillForm: (request) => form?.fill(request),
    formPrompt: () => form.prompt(),
  });

  store.on(["connected"], ({ connected }) => {
    banner.hidden = connected;
    show(banner, connected ? "" : "The server does not answer. This page goes on when it is back.");
  });
  store.on(["model", "status"], facts);
  store.on(["run"], ({ run }) => { find("welcome").hidden = run !== null; });

  liveView(find("live"), store);
  answerView(find("answer"), store, actions);
  strengthView(find("strength"), store, actions);
  candidatesView(find("candidates"), store, actions);
  honestyView(find("honesty"), store, actions);

  while (!(await api.alive())) {
    store.set({ connected: false });
    await new Promise((done) => setTimeout(done, 1000));
  }
  store.set({ connected: true });
  await actions.attempt(async () => {
    const [models, rewards, { presets, settings }] = await Promise.all([api.models(), api.rewards(), api.settings()]);
    store.set({ model: models[0] ?? null, rewards, presets, settings });
  });
  if (store.state.model !== null) { // else there are finished runs to look at, and nothing to ask
    form = askForm(find("ask-form"), { state: store.state, actions });
    const refreshForm = ({ run, connected }) => form.refresh({ busy: run !== null && !over(run), connected });
    store.on(["run", "connected"], refreshForm);
    refreshForm(store.state);
  }
  shelfView(find("shelf"), store, actions);
  await actions.refresh();

  const follow = () => {
    const id = new URLSearchParams(location.hash.slice(1)).get("run");
    if (id) actions.open(id);
    else if (store.state.model === null && store.state.runs.length) actions.open(store.state.runs[0].id);
  };
  addEventListener("hashchange", follow);
  follow();
  setInterval(async () => {
    const { run, connected } = store.state;
    if (run !== null && !over(run) && connected && !document.hidden) await actions.attempt(async () => store.set({ status: await api.status() }));
    else if (store.state.status !== null) store.set({ status: null });
  }, STATUS_EVERY);
  document.body.dataset.ready = "yes";
}

start();
