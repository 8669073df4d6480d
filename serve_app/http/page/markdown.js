// Shows an answer's Markdown: headings, lists, tables, code, emphasis, links. Whatever else it says is text.
import { element } from "./dom.js";

const INLINE = /(`[^`\n]+`)|\*\*([^*\n]+)\*\*|\*([^*\s][^*\n]*)\*|\[([^\]\n]+)\]\((https?:\/\/[^\s)]+)\)/;

function inline(text) {
  const nodes = [];
  for (let rest = text; rest; ) {
    const found = INLINE.exec(rest);
    if (!found) return [...nodes, rest];
    const [all, code, strong, emphasis, name, url] = found;
    if (found.index) nodes.push(rest.slice(0, found.index));
    if (code) nodes.push(element("code", { textContent: code.slice(1, -1) }));
    else if (strong) nodes.push(element("strong", {}, ...inline(strong)));
    else if (emphasis) nodes.push(element("em", {}, ...inline(emphasis)));
    else nodes.push(element("a", { href: url, rel: "noreferrer noopener", target: "_blank", textContent: name }));
    rest = rest.slice(found.index + all.length);
  }
  return nodes;
}

const BLOCKS = [
  [/^```[^\n]*\n([\s\S]*?)(?:\n```[^\S\n]*(?:\n|$)|$)/, ([, code]) => element("pre", {}, element("code", { textContent: code }))],
  [/^(#{1,6}) +([^\n]+)(?:\n|$)/, ([, , title]) => element("h3", {}, ...inline(title))],
  [/^(?:[-*] +[^\n]+(?:\n|$))+/, ([all]) => list("ul", all, /^[-*] +/)],
  [/^(?:\d+[.)] +[^\n]+(?:\n|$))+/, ([all]) => list("ol", all, /^\d+[.)] +/)],
  [/^\|[^\n]+\|[^\S\n]*\n\|[-:| ]+\|[^\S\n]*(?:\n|$)(?:\|[^\n]+\|[^\S\n]*(?:\n|$))*/, ([all]) => table(all)],
  [/^\n+/, () => null],
  [/^[^\n]+(?:\n(?!\n|```|#{1,6} |[-*] |\d+[.)] |\|)[^\n]+)*\n?/, ([all]) => element("p", {}, ...inline(all.trimEnd()))],
];

function list(tag, text, mark) {
  return element(tag, {}, ...text.trimEnd().split("\n").map((line) => element("li", {}, ...inline(line.replace(mark, "")))));
}

function table(text) {
  const [head, , ...rows] = text.trimEnd().split("\n").map((line) => line.trim().slice(1, -1).split("|"));
  const row = (cells, tag) => element("tr", {}, ...cells.map((cell) => element(tag, {}, ...inline(cell.trim()))));
  return element("table", {}, row(head, "th"), ...rows.map((cells) => row(cells, "td")));
}

// The elements of a text.
export function markdown(text) {
  const nodes = [];
  for (let rest = text; rest; ) {
    for (const [pattern, make] of BLOCKS) {
      const found = pattern.exec(rest);
      if (!found) continue;
      const node = make(found);
      if (node) nodes.push(node);
      rest = rest.slice(found[0].length);
      break;
    }
  }
  return nodes;
}
