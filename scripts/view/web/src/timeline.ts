// What actors, learner and replay did when: lanes over one axis of time, and what happened beside.

import { h, lasting, short } from "./dom";
import { clock, Lanes, type View } from "./lanes";
import * as source from "./source";

const NOTE_MS = 80; // after the last movement
const LIVE_MS = 1000; // the least between two looks at what is new
const WAITS_MS = 2000; // between two looks at who waits
const LEAST_S = 0.05; // from left to right
const KINDS: [string, string[]][] = [
  ["Actors", ["generate", "search", "other", "unknown", "lease"]],
  ["Engines", ["running", "queued", "kv", "untold"]],
  ["Learner", ["train", "publish", "wait"]],
  ["Replay, groups", ["ready", "filling"]],
  ["Retrieval", ["asked"]],
  ["Weights, actors", ["apply", "receive", "behind"]],
];
const EVENTS: [string, string][] = [
  ["start", "start"], ["restart", "restart"], ["checkpoint", "checkpoint"], ["sentinel", "a sentinel fires"], ["rollback", "a rollback"], ["refit", "weights are sent again"], ["drop", "a rollout or a question is lost"],
  ["group", "a group is dropped"], ["actor", "an actor joins or leaves"], ["stop", "stop"],
];
const MEANS: Record<string, string> = {
  generate: "rollouts whose turn is being written",
  search: "rollouts that wait for a search",
  other: "leased, but neither generating nor searching: environment, reward, queues",
  unknown: "no record of what it did: not delivered yet, never delivered, or compacted away",
  lease: "places that wait for one: replay gives out no more",
  running: "requests that the engine's last step ran",
  queued: "requests that wait for a slot or for room in its cache",
  kv: "the most of its cache that was in use since it last told, a line from none to all",
  untold: "share of the time of which nothing is told: it starts, or has ended",
  train: "the update of a step",
  publish: "new weights are handed over",
  wait: "for a batch",
  ready: "train groups that wait for the learner",
  filling: "train groups whose rollouts are under way",
  asked: "searches under way, of all actors",
  apply: "pause to take up a version",
  receive: "receive one and go on writing",
  behind: "a newer version is out, and they do not serve it yet",
};

/** The page; `asked`: run, and the time from and to, of its address. */
export async function page(asked: source.Asked): Promise<HTMLElement> {
  const told = await source.overview();
  const run = Math.min(Math.max(Number(asked.run) || 0, 0), told.runs.length - 1);
  const shown = new Timeline(run, told.runs.length > 1 ? told.runs.map((each) => each.name) : []);
  await shown.begin(Number(asked.time_from) || null, Number(asked.time_to) || null);
  return shown.element;
}

class Timeline {
  readonly element: HTMLElement;
  private readonly range = h("span", { class: "soft range" });
  private readonly readout = h("p", { class: "readout", role: "status" }, "Point at a lane, or go through them with the arrow keys.");
  private readonly waits = h("section", { class: "waits", "aria-label": "Who waits for whom" });
  private readonly lacks = h("p", { class: "soft", hidden: true },
    "What engines did and how long actors waited for leases is unknown: this run has no waits.jsonl.");
  private readonly lanes: Lanes;
  private found: source.Timeline | null = null;
  private view: View = { from: 0, to: 1 };
  private whole = true;
  private waiting = 0;
  private asking = false;
  private again = false; // once the answer is there
  private askedAt = 0;

  constructor(private readonly run: number, names: string[]) {
    this.lanes = new Lanes({
      moved: (view) => this.move(view),
      pointed: (said) => { this.readout.textContent = said; },
      chosen: (lane, from, to) => this.open(lane, from, to),
      whole: () => this.all(),
    });
    const button = (said: string, label: string, act: () => void): HTMLElement =>
      h("button", { type: "button", "aria-label": label, title: label, onclick: act }, said);
    const select = h("select", { "aria-label": "Run", onchange: () => { location.hash = `#timeline?run=${select.value}`; } },
      names.map((name, n) => h("option", { value: n, selected: n === run }, name)));
    this.element = h(
      "div",
      { class: "page timeline" },
      h("div", { class: "filters" },
        names.length ? select : null,
        button("−", "Further away (−)", () => this.lanes.zoom(2)),
        button("+", "Closer (+)", () => this.lanes.zoom(0.5)),
        button("◀", "Earlier (left)", () => this.lanes.pan(-0.25)),
        button("▶", "Later (right)", () => this.lanes.pan(0.25)),
        button("Whole run", "The whole run (0)", () => this.all()),
        this.range),
      this.lanes.element,
      this.readout,
      this.lacks,
      this.waits,
      h("div", { class: "legend lane-legend" }, KINDS.flatMap(([title, states]) => [
        h("strong", {}, title),
        ...states.map((state) => h("span", { title: MEANS[state] }, h("span", { class: `swatch l-${state}` }), `${state}: ${MEANS[state]}`)),
      ]), h("strong", {}, "Events"), EVENTS.map(([kind, said]) => h("span", {}, h("span", { class: `swatch e-${kind}` }), said))),
      h("p", { class: "soft", id: "lane-keys" },
        "Wheel or + and − to look closer, drag or left and right to move, up and down for another lane, ",
        "Shift with left and right for the place in it, 0 for the whole run; a click or Enter shows the rollouts of that time."),
    );
    let due = 0;
    const news = (): void => {
      if (!this.element.isConnected) return window.removeEventListener("news", news);
      clearTimeout(due);
      due = window.setTimeout(() => void this.ask(), Math.max(0, this.askedAt + LIVE_MS - Date.now()));
    };
    window.addEventListener("news", news);
  }

  /** Shows a time, or the whole run. */
  async begin(from: number | null, to: number | null): Promise<void> {
    if (from !== null && to !== null && to > from) {
      this.whole = false;
      this.view = { from, to };
    }
    await Promise.all([this.ask(), this.wait()]);
  }

  /** Tells who waits for whom, again and again while the page is shown. */
  private async wait(): Promise<void> {
    try {
      const { at, lines, unseen } = await source.waits(this.run);
      this.waits.replaceChildren(...(at === null ? [] : waiting(at, lines, unseen)));
    } catch {
      this.waits.replaceChildren(); // the server is gone: the head of the page says so
    }
    if (source.isFile) return;
    window.setTimeout(() => { if (this.element.isConnected) void this.wait(); }, WAITS_MS);
  }

  private all(): void {
    clearTimeout(this.waiting);
    this.whole = true;
    this.note();
    void this.ask();
  }

  private move(view: View): void {
    const { first, last } = this.found ?? { first: 0, last: 0 };
    const length = Math.min(Math.max(view.to - view.from, LEAST_S), Math.max(last - first, LEAST_S));
    const from = Math.min(Math.max(view.from, first), last - length);
    this.whole = length >= last - first;
    this.view = { from, to: from + length };
    this.tell();
    this.lanes.show(this.found, this.view);
    clearTimeout(this.waiting);
    this.waiting = window.setTimeout(() => {
      if (location.hash.startsWith("#timeline")) this.note();
    }, NOTE_MS);
    void this.ask();
  }

  /** Has the address say what is seen: one comes back to it. */
  private note(): void {
    const time = this.whole ? "" : `&time_from=${this.view.from.toFixed(3)}&time_to=${this.view.to.toFixed(3)}`;
    history.replaceState(null, "", `#timeline?run=${this.run}${time}`);
  }

  /** Asks for what is seen; while an answer is due, once more after it. */
  private async ask(): Promise<void> {
    this.again = this.asking;
    if (this.asking) return;
    this.asking = true;
    this.askedAt = Date.now();
    const view = this.whole ? null : this.view;
    try {
      const found = await source.timeline(this.run, view);
      this.found = found;
      this.lacks.hidden = found.sampled;
      if (this.whole && !view) this.view = { from: found.first, to: Math.max(found.last, found.first + LEAST_S) };
      this.tell();
      this.lanes.show(found, this.view);
    } catch (error) {
      this.readout.textContent = String(error);
    }
    this.asking = false;
    if (this.again) void this.ask();
  }

  private tell(): void {
    const { from, to } = this.view;
    const exact = Math.min((to - from) / 100, 1);
    const day = new Date(from * 1000).toLocaleDateString();
    const bin = this.found ? `, a bin is ${short(Number(this.found.width.toPrecision(3)))} s` : "";
    this.range.textContent = `${day}, ${clock(from, exact)} to ${clock(to, exact)}: ${lasting(to - from)}${this.whole ? ", the whole run" : ""}${bin}`;
  }

  private open(lane: source.Lane | null, from: number, to: number): void {
    const asked: source.Asked = { run: String(this.run), time_from: from.toFixed(3), time_to: to.toFixed(3) };
    if (lane && ["actor", "engine"].includes(lane.kind) && lane.name) asked.actor = lane.name;
    clearTimeout(this.waiting);
    this.note();
    location.hash = `#rollouts?${new URLSearchParams(asked)}`;
  }
}

function waiting(at: number, lines: source.Waits["lines"], unseen: number): HTMLElement[] {
  const row = ({ who, whom, what }: source.Waits["lines"][number]): HTMLElement =>
    h("tr", {}, h("td", {}, who), h("td", { class: whom ? "whom" : "soft" }, whom ? `waits for ${whom}` : "works"), h("td", {}, what));
  return [
    h("h2", {}, "Now: who waits for whom ", h("span", { class: "soft" }, clock(at, 1))),
    h("div", { class: "events" }, h("table", {}, h("tbody", {}, lines.map(row)))),
    ...(unseen ? [h("p", { class: "none" }, `and ${unseen} more`)] : []),
  ];
}
