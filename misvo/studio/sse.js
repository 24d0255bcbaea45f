// Server-sent events out of pieces of text as they come from the network. No document here.

export class EventParser {
  #rest = "";

  /** The events that are whole now: {id, data}. */
  push(text) {
    const blocks = (this.#rest + text).split("\n\n");
    this.#rest = blocks.pop();
    return blocks.map(read).filter((event) => event !== null);
  }
}

function read(block) {
  let id = null;
  const data = [];
  for (const line of block.split("\n")) {
    if (line.startsWith("data:")) data.push(line.slice(5).trimStart());
    else if (line.startsWith("id:")) id = Number(line.slice(3));
  }
  return data.length ? { id, data: JSON.parse(data.join("\n")) } : null; // a comment has no data
}
