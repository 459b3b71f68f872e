// One rollout: its turns in colour, what is known of each token, siblings, the question over time.

import { h, moment, short } from "./dom";
import * as source from "./source";

const MOST_SPANS = 4000; // tokens of a turn that are elements of their own
const MOST_OTHERS = 100;
const TAGS: [RegExp, string][] = [
  [/<think>[^]*?(<\/think>|$)/g, "think"],
  [/<search>[^]*?(<\/search>|$)/g, "search"],
  [/<tool_call>[^]*?(<\/tool_call>|$)/g, "search"],
  [/<answer>[^]*?(<\/answer>|$)/g, "answer"],
];

let folded = false; // passages

/** The rollout's elements; `open` shows another in its place; `run`: the name of its run, if there are several. */
export async function shown(row: source.Row, open: (row: source.Row) => void, run: string): Promise<HTMLElement[]> {
  let detail: source.Detail;
  try {
    detail = await source.rollout(row.run, row.number);
  } catch (error) {
    return [h("p", { class: "bad", role: "alert" }, String(error))];
  }
  if (detail.gone) return [head(row), h("p", { class: "none" }, `Not shown: ${detail.gone}.`)];
  const readout = h("p", { class: "readout", role: "status" }, "Point at a token, or go through them with Tab: probability, log-probability, version.");
  return [
    head(row),
    facts(row, detail, run),
    detail.lacks ? h("p", { class: "bad" }, detail.lacks) : null,
    legend(),
    readout,
    h("div", { class: "sequences" }, detail.sequences.map((each) => sequence(each, detail.sequences.length > 1, readout))),
    await others("Siblings", { run: String(row.run), group: String(row.group_id) }, row, open),
    await others("This question, over time", { run: String(row.run), question: row.question_id }, row, open),
  ].filter((each): each is HTMLElement => each !== null);
}

function head(row: source.Row): HTMLElement {
  return h("h2", { class: "question" }, row.question || row.question_id);
}

function facts(row: source.Row, detail: source.Detail, run: string): HTMLElement {
  const parts = Object.entries(detail.parts).map(([name, value]) => `${name} ${short(value)}`);
  const seconds = Object.entries(detail.timings).map(([name, value]) => `${name} ${short(value)}`);
  const listed: [string, string][] = [
    ["run", run],
    ["answer", row.answer || "none"],
    ["expected", row.expected],
    ["reward", row.reward === null ? `none: ${detail.cause}` : `${short(row.reward)}${parts.length ? ` (${parts.join(", ")})` : ""}`],
    ["stop", row.stop],
    [row.kind === "eval" ? "evaluated" : "trained", row.step === null ? row.fate || "not yet" : `step ${row.step}`],
    ["versions", row.oldest === row.newest ? String(row.oldest) : `${row.oldest} to ${row.newest}`],
    ["staleness", short(row.staleness)],
    ["actor", `${detail.actor}${detail.attempt ? `, attempt ${detail.attempt + 1}` : ""}`],
    ["delivered", moment(row.at)],
    ["seconds", seconds.join(", ")],
    ["learner’s values", detail.unknown],
  ];
  return h("dl", {}, listed.filter(([, value]) => value).map(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]).flat());
}

function legend(): HTMLElement {
  const check = h("input", { type: "checkbox", onchange: () => document.body.classList.toggle("by-probability", check.checked) });
  check.checked = document.body.classList.contains("by-probability");
  const fold = h("input", { type: "checkbox", id: "fold", onchange: () => {
    folded = fold.checked;
    for (const each of document.querySelectorAll<HTMLDetailsElement>("details.passage")) each.open = !folded;
  } });
  fold.checked = folded;
  return h(
    "p",
    { class: "legend" },
    ["think", "search", "answer", "passage", "correction"].map((name) => h("span", { class: `key t-${name}` }, name)),
    h("label", {}, check, "shade by probability"),
    h("label", {}, fold, "fold passages"),
  );
}

function sequence(told: source.Detail["sequences"][number], named: boolean, readout: HTMLElement): HTMLElement {
  return h(
    "article",
    { class: "sequence" },
    named ? h("h3", {}, told.name || "first") : null,
    h("details", {}, h("summary", {}, "prompt"), h("pre", { class: "prompt" }, told.prompt)),
    told.turns.map((turn, number) => [
      action(turn, number, readout),
      turn.tokens.length > MOST_SPANS
        ? h("p", { class: "none" }, `Only the first ${MOST_SPANS.toLocaleString()} of these ${turn.tokens.length.toLocaleString()} tokens are coloured and have values.`)
        : null,
      turn.left ? h("p", { class: "none" }, `… (${turn.left.toLocaleString()} more tokens)`) : null,
      turn.searches.length
        ? h("ul", { class: "searches" }, turn.searches.map((each) =>
            h("li", {}, `“${each.query}”: ${each.status === "ok" ? each.passages.join(", ") : each.status} (${short(each.seconds)} s)`)))
        : null,
      turn.observation.map((piece) => read(piece, turn.malformed)),
      turn.info ? h("pre", { class: "info" }, turn.info) : null,
    ]).flat(2),
  );
}

/** A passage below its title, or what stands around passages. */
function read(piece: source.Piece, corrects: boolean): HTMLElement {
  if (!piece.title) return h("pre", { class: corrects ? "t-correction" : "t-passage" }, piece.text);
  return h(
    "details",
    { class: "passage", open: !folded },
    h("summary", {}, piece.title, piece.id ? h("span", { class: "soft" }, ` ${piece.id}`) : null),
    h("pre", { class: "t-passage" }, piece.text),
  );
}

function action(turn: source.Turn, number: number, readout: HTMLElement): HTMLElement {
  const text = turn.tokens.join("");
  const kinds = kindsOf(text);
  const made = h("pre", { class: "action", "aria-label": `turn ${number + 1}`, tabindex: "0" });
  const told = turn.tokens.slice(0, MOST_SPANS);
  let at = 0;
  told.forEach((token, place) => {
    const kind = kinds[Math.max(at, at + token.length - 1)]; // its blank may stand before a tag
    const span = h("span", { class: kind ? `t-${kind}` : undefined, "data-place": place }, token);
    const logprob = turn.logprobs[place] ?? null;
    span.style.setProperty("--doubt", logprob === null ? "1" : String(1 - Math.exp(Math.min(0, logprob))));
    made.append(span);
    at += token.length;
  });
  made.append(text.slice(at));
  let pointed = -1;
  const point = (place: number): void => {
    made.querySelector(".pointed")?.classList.remove("pointed");
    pointed = place;
    made.children[place]?.classList.add("pointed");
    const logprob = turn.logprobs[place] ?? null;
    const odds = logprob === null ? "not finite" : `${short(Math.exp(logprob))}, log ${short(logprob)}`;
    readout.textContent = `turn ${number + 1}, token ${place + 1} ${JSON.stringify(turn.tokens[place])}: probability ${odds}; version ${turn.versions[place]}${learnt(turn, place)}`;
  };
  made.addEventListener("pointerover", (event) => {
    const place = (event.target as HTMLElement).dataset.place;
    if (place) point(Number(place));
  });
  made.addEventListener("keydown", (event) => {
    const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!by) return;
    event.preventDefault();
    point(Math.min(told.length - 1, Math.max(0, pointed + by)));
  });
  return made;
}

/** What the learner made of a token, in a line of its own. */
function learnt(turn: source.Turn, place: number): string {
  const made = turn.learnt;
  if (!made) return "";
  const proximal = made.proximal ? `, proximal ${short(made.proximal[place])}` : "";
  return `\nlog-probability behaviour ${short(turn.logprobs[place])}${proximal}, current ${short(made.current[place])}; ratio ${short(made.ratio[place])}, weight ${short(made.weight[place])}; advantage ${short(made.advantage[place])}; ${source.FATES[made.fate[place]!]}`;
}

/** What each character of a turn is part of. */
function kindsOf(text: string): (string | undefined)[] {
  const found: (string | undefined)[] = new Array(text.length);
  for (const [pattern, kind] of TAGS) {
    for (const match of text.matchAll(pattern)) {
      for (let at = match.index; at < match.index + match[0].length; at++) found[at] ??= kind;
    }
  }
  return found;
}

/** The newest of those that are asked for, in the order in which they came. */
async function others(title: string, asked: source.Asked, row: source.Row, open: (row: source.Row) => void): Promise<HTMLElement | null> {
  const found = await source.rollouts({ ...asked, sort: "number", descending: "1" }, 0, MOST_OTHERS);
  if (found.count < 2 && !source.extract()) return null;
  return h(
    "section",
    { class: "others" },
    h("h3", {}, `${title}, step: reward (${found.count > MOST_OTHERS ? `the newest ${MOST_OTHERS} of ` : ""}${found.count.toLocaleString()}${source.extract() ? " in this file" : ""})`),
    found.rows.reverse().map((each) =>
      h(
        "button",
        { type: "button", class: `chip${each.number === row.number ? " picked" : ""}`, title: `${each.answer || "no answer"}; ${each.searches} searches; ${each.stop}`, onclick: () => open(each) },
        `${each.step === null ? "–" : each.step}${each.kind === "eval" ? "e" : ""}: ${short(each.reward)}`,
      ),
    ),
  );
}
