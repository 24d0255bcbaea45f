// Elements from plain values. Text is always inserted as text: nothing here parses HTML.

const SVG = "http://www.w3.org/2000/svg";

function fill(element, props, children) {
  for (const [name, value] of Object.entries(props)) {
    if (value === undefined || value === null || value === false) continue;
    if (name === "on") for (const [event, listener] of Object.entries(value)) element.addEventListener(event, listener);
    else if (name === "data") for (const [key, content] of Object.entries(value)) element.dataset[key] = content;
    else if (name === "vars") for (const [key, content] of Object.entries(value)) element.style.setProperty(`--${key}`, content);
    else if (name === "value" || name === "checked" || name === "disabled") element[name] = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...shown(children));
  return element;
}

/** Children as they are written: lists in lists, and nothing where there is null, undefined or false. */
const shown = (children) => children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false);

/** h("p", {class: "note", data: {step: 3}, on: {click}}, "text", element, …) */
export function h(tag, props = {}, ...children) {
  return fill(document.createElement(tag), props, children);
}

/** The same for drawings. */
export function s(tag, props = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), props, children);
}

/** Put other children in the place of those that are there. */
export function show(element, ...children) {
  element.replaceChildren(...shown(children));
  return element;
}

let numbers = 0;

/** An id that no other element has. */
export function unique(stem) {
  numbers += 1;
  return `${stem}-${numbers}`;
}

/** A control with its label and, below it, what it is for. */
export function field(label, control, help = "") {
  control.id ||= unique("field");
  const about = help ? h("small", { id: `${control.id}-help` }, help) : null;
  if (about) control.setAttribute("aria-describedby", about.id);
  return h("div", { class: "field" }, h("label", { for: control.id }, label), control, about);
}
