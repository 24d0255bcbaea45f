// What is wrong with the page for people who do not see it, or not well. An expression: test_access.py evaluates it.
() => {
  const every = (selector) => [...document.querySelectorAll(selector)];
  const isShown = (one) => one.getClientRects().length > 0;
  const head = (one) => one.outerHTML.slice(0, 160);

  // Controls and pictures without a name.
  const CONTROLS = "button, a[href], input, select, textarea, summary, [role=button], svg[role=img], dialog, [role=table]";
  const NAMED_BY_CONTENT = "button, a, summary, [role=button]";
  const text = (one) => one.textContent.trim() || [...one.querySelectorAll("[aria-label]")].map((e) => e.ariaLabel).join("");
  const told = (one, name) => (one.getAttribute(name) ?? "").split(" ").map((id) => (id && document.getElementById(id)?.textContent.trim()) || "").join("");
  const nameOf = (one) => (one.ariaLabel ?? "").trim() || told(one, "aria-labelledby") || [...(one.labels ?? [])].map(text).join("") || (one.matches(NAMED_BY_CONTENT) ? text(one) : "");
  const nameless = every(CONTROLS).filter((one) => isShown(one) && !nameOf(one)).map(head);

  // Ids that are there twice, references to nothing, headings that skip a level.
  const ids = every("[id]").map((one) => one.id);
  const twice = ids.filter((id, place) => ids.indexOf(id) !== place);
  const dangling = ["for", "aria-labelledby", "aria-describedby", "aria-controls"].flatMap((name) =>
    every(`[${name}]`).flatMap((one) => one.getAttribute(name).split(" ").filter((id) => !document.getElementById(id)).map((id) => `${name}=${id}`)));
  const levels = every("h1, h2, h3, h4").filter(isShown).map((one) => Number(one.tagName[1]));
  const skipped = levels.filter((level, place) => level > (levels[place - 1] ?? 0) + 1);

  // Texts that are faint against what is painted behind them, by WCAG 2. A canvas turns any colour into numbers.
  const brush = Object.assign(document.createElement("canvas"), { width: 1, height: 1 }).getContext("2d", { willReadFrequently: true });
  const colours = new Map();
  const rgba = (colour) => {
    if (!colours.has(colour)) {
      brush.clearRect(0, 0, 1, 1);
      brush.fillStyle = colour;
      brush.fillRect(0, 0, 1, 1);
      const [r, g, b, a] = brush.getImageData(0, 0, 1, 1).data;
      colours.set(colour, [r, g, b, a / 255]);
    }
    return colours.get(colour);
  };
  const over = (top, below) => [0, 1, 2].map((i) => top[i] * top[3] + below[i] * (1 - top[3]));
  const behind = (one) => {
    const layers = [];
    for (let at = one; at; at = at.parentElement) layers.push(rgba(getComputedStyle(at).backgroundColor));
    const page = matchMedia("(prefers-color-scheme: dark)").matches ? [18, 18, 18] : [255, 255, 255];
    return layers.reverse().reduce((below, layer) => over(layer, below), page);
  };
  const linear = (value) => (value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4);
  const light = ([r, g, b]) => 0.2126 * linear(r / 255) + 0.7152 * linear(g / 255) + 0.0722 * linear(b / 255);
  const faint = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const one = walker.currentNode.parentElement;
    if (!walker.currentNode.textContent.trim() || !isShown(one) || one.closest("[disabled], .unseen, svg")) continue;
    const style = getComputedStyle(one);
    const ground = behind(one);
    const [high, low] = [light(over(rgba(style.color), ground)), light(ground)].sort((a, b) => b - a);
    const size = parseFloat(style.fontSize);
    const least = size >= 24 || (size >= 18.66 && style.fontWeight >= 700) ? 3 : 4.5;
    const ratio = (high + 0.05) / (low + 0.05);
    if (ratio < least) faint.push(`${ratio.toFixed(2)}: ${head(one)}`);
  }

  // What moves.
  const seconds = (times) => Math.max(...times.split(",").map(parseFloat));
  const moving = every("*").filter((one) => {
    const style = getComputedStyle(one);
    return seconds(style.transitionDuration) > 0.01 || (style.animationName !== "none" && seconds(style.animationDuration) > 0.01);
  }).map(head);

  return { nameless, twice, dangling, skipped, faint, moving, language: document.documentElement.lang, firsts: levels.filter((level) => level === 1).length };
}
