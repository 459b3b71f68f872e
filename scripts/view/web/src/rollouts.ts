// The rollouts of all runs: filters, a table of which only what is seen is drawn, one rollout.

import { h, short } from "./dom";
import { clock } from "./lanes";
import { released } from "./press";
import { shown } from "./rollout";
import * as source from "./source";

const ROW = 30; // pixels
const CHUNK = 100; // rows asked for at once
const MOST_CHUNKS = 5; // of one answer
const AHEAD = 10; // rows drawn above and below what is seen

interface Column { key: string; title: string; of: (row: source.Row) => string; sorts?: boolean }

const COLUMNS: Column[] = [
  { key: "number", title: "record", of: (row) => String(row.number), sorts: true },
  { key: "kind", title: "kind", of: (row) => row.kind },
  { key: "step", title: "step", of: (row) => (row.step === null ? row.fate || "waits" : String(row.step)), sorts: true },
  { key: "reward", title: "reward", of: (row) => short(row.reward), sorts: true },
  { key: "searches", title: "searches", of: (row) => String(row.searches), sorts: true },
  { key: "turns", title: "turns", of: (row) => String(row.turns), sorts: true },
  { key: "tokens", title: "tokens", of: (row) => String(row.tokens), sorts: true },
  { key: "staleness", title: "stale", of: (row) => short(row.staleness), sorts: true },
  { key: "malformed", title: "malformed", of: (row) => String(row.malformed), sorts: true },
  { key: "stop", title: "stop", of: (row) => (row.gone ? "compacted" : row.stop), sorts: true },
  { key: "question", title: "question", of: (row) => row.question || row.question_id, sorts: true },
  { key: "answer", title: "answer", of: (row) => row.answer },
];

/** The columns; of several runs each row says whose it is. */
function columns(names: string[]): Column[] {
  return names.length > 1 ? [{ key: "run", title: "run", of: (row) => names[row.run] ?? "" }, ...COLUMNS] : COLUMNS;
}

/** The page; `asked`: the filters in its address. */
export async function page(asked: source.Asked): Promise<HTMLElement> {
  const told = await source.overview();
  const names = told.runs.map((run) => run.name);
  const detail = h("section", { class: "detail", "aria-label": "Rollout", tabindex: "-1" });
  let opened = 0;
  const open = async (row: source.Row): Promise<void> => {
    const turn = ++opened;
    detail.replaceChildren(h("p", {}, "…"));
    const made = await shown(row, open, names.length > 1 ? names[row.run]! : "");
    if (turn !== opened) return; // another was chosen meanwhile
    detail.replaceChildren(...made);
    if (matchMedia("(max-width: 900px)").matches) detail.scrollIntoView();
  };
  let now = asked;
  const show = (changed: source.Asked): void => {
    now = changed;
    history.replaceState(null, "", `#rollouts?${new URLSearchParams(changed)}`);
    void table.show(changed);
  };
  const table = new Table(asked, columns(names), open, (order) => show({ ...now, ...order }));
  return h(
    "div",
    { class: "page rollouts" },
    filters(told, asked, (given) => show({ ...kept(now), ...given })),
    h("div", { class: "beside" }, table.element, detail),
  );
}

function filters(told: source.Overview, asked: source.Asked, changed: (asked: source.Asked) => void): HTMLElement {
  const field = (name: string, title: string, input: HTMLInputElement | HTMLSelectElement): HTMLElement => {
    input.name = name;
    return h("label", {}, title, input);
  };
  const select = (name: string, title: string, options: [string, string][]): HTMLElement =>
    field(name, title, h("select", {}, options.map(([value, said]) => h("option", { value, selected: (asked[name] ?? "") === value }, said))));
  const input = (name: string, title: string, type: string, placeholder = ""): HTMLElement =>
    field(name, title, h("input", { type, value: asked[name] ?? "", step: "any", size: type === "search" ? 24 : 12, placeholder }));
  const form = h(
    "form",
    { class: "filters", role: "search", onsubmit: (event: Event) => event.preventDefault() },
    input("text", "Text", "search"),
    told.runs.length > 1 ? select("run", "Run", [["", "all"], ...told.runs.map((run, n): [string, string] => [String(n), run.name])]) : null,
    select("kind", "Kind", [["", "all"], ["train", "train"], ["eval", "evaluation"]]),
    select("stop", "Stop", [["", "all"], ...told.stops.map((each): [string, string] => [each, each])]),
    select("which", "Which", [["", "all"], ...Object.entries(source.WHICH).map(([each, { said }]): [string, string] => [each, said])]),
    input("steps", "Steps", "text", "31-40,55"),
    input("reward_from", "Reward from", "number"),
    input("reward_to", "to", "number"),
    input("searches_from", "Searches from", "number"),
    input("searches_to", "to", "number"),
    input("staleness_from", "Staleness from", "number"),
    input("staleness_to", "to", "number"),
    input("question", "Question's id", "search"),
    h("button", { type: "button", onclick: () => { location.hash = "#rollouts"; } }, "Clear"),
    asked.time_from || asked.actor ? h("span", { class: "soft" }, ofTime(asked)) : null,
  );
  let waiting = 0;
  form.addEventListener("input", () => {
    clearTimeout(waiting);
    waiting = window.setTimeout(() => {
      const given = [...new FormData(form)].map(([name, value]) => [name, String(value).trim()]);
      changed(Object.fromEntries(given.filter(([, value]) => value)));
    }, 50);
  });
  return form;
}

/** What an address asks for beside the filters. */
function kept(asked: source.Asked): source.Asked {
  const names = ["group", "actor", "time_from", "time_to", "sort", "descending"];
  return Object.fromEntries(Object.entries(asked).filter(([name]) => names.includes(name)));
}

/** The actor and the time that an address asks for, in words. */
function ofTime(asked: source.Asked): string {
  const [from, to] = [Number(asked.time_from), Number(asked.time_to)];
  const exact = Math.min((to - from) / 100, 1);
  const time = from && to ? `under way from ${clock(from, exact)} to ${clock(to, exact)}` : "";
  return [time, asked.actor ? `of ${asked.actor}` : ""].filter(Boolean).join(" ");
}

/** A table that asks for the rows that are seen, and draws no others. */
class Table {
  readonly element: HTMLElement;
  private readonly count = h("p", { class: "soft", role: "status" });
  private readonly head = h("div", { class: "row head", role: "row" });
  private readonly rows = h("div", { class: "space", role: "rowgroup" });
  private readonly view = h("div", { class: "view", tabindex: "0", role: "grid", "aria-label": "Rollouts" });
  private readonly lines = new WeakMap<source.Row, HTMLElement>();
  private chunks = new Map<number, source.Row[]>();
  private asking = new Map<number, Promise<source.Row[]>>();
  private total = 0;
  private picked = ""; // the rollout that is marked
  private place = -1; // where it stands, as far as is known
  private picks = 0;
  private asked: source.Asked = {};
  private generation = 0;
  private due = 0; // the generation whose answer is not there yet
  private further = false; // news since it was asked for

  constructor(
    asked: source.Asked,
    private readonly columns: Column[],
    private readonly open: (row: source.Row) => void,
    private readonly sorted: (order: source.Asked) => void,
  ) {
    this.view.append(this.head, this.rows);
    this.element = h("section", { class: `table${columns.length > COLUMNS.length ? " several" : ""}`, "aria-label": "Table" }, this.count, this.view);
    this.view.addEventListener("scroll", () => this.draw(), { passive: true });
    this.view.addEventListener("keydown", (event) => this.key(event));
    const news = (): void => {
      if (!this.element.isConnected) return window.removeEventListener("news", news);
      if (this.due) this.further = true;
      else void this.again(true);
    };
    window.addEventListener("news", news);
    new ResizeObserver(() => this.draw()).observe(this.view);
    void this.show(asked);
  }

  /** Shows what is asked for, from the start. */
  async show(asked: source.Asked): Promise<void> {
    this.asked = { sort: "number", descending: "1", ...asked };
    this.place = -1;
    this.view.scrollTop = 0;
    this.header();
    await this.again(false);
  }

  /** Asks anew for what is seen. Because of news: the answer waits while a pointer is down on a row, and the rollout
   * that is marked, or the rows that new ones push on, stay where they are, unless the first row is seen.
   */
  private async again(news: boolean): Promise<void> {
    const generation = this.due = ++this.generation;
    const { first, last } = this.seen();
    const begin = Math.floor(first / CHUNK);
    const end = Math.min(Math.ceil(last / CHUNK) + (news ? 1 : 0), begin + MOST_CHUNKS);
    try {
      const found = await source.rollouts(this.asked, begin * CHUNK, (end - begin) * CHUNK);
      if (news) await released();
      if (generation !== this.generation) return;
      const newestFirst = this.asked.sort === "number" && this.asked.descending === "1";
      const pushed = !news || !newestFirst ? 0 : this.several() ? this.moved(found.rows, begin * CHUNK) : found.count - this.total;
      const before = this.place;
      if (before >= 0) this.place += pushed;
      this.chunks.clear();
      this.asking.clear();
      for (let chunk = begin; chunk < end; chunk++) {
        this.take(chunk, found.rows.slice((chunk - begin) * CHUNK, (chunk - begin + 1) * CHUNK));
      }
      this.total = found.count;
      this.rows.style.height = `${this.total * ROW}px`;
      if (news && this.view.scrollTop) this.view.scrollTop += (before < 0 ? pushed : this.place - before) * ROW;
      this.count.textContent = [`${found.count.toLocaleString()} rollouts`, source.extract()].filter(Boolean).join(" ");
      this.count.classList.remove("bad");
    } catch (error) {
      if (generation !== this.generation) return;
      this.fault(error);
    }
    this.due = 0;
    this.draw();
    if (this.further) {
      this.further = false;
      void this.again(true);
    }
  }

  /** True where rows of several runs come in between each other. */
  private several(): boolean {
    return this.columns.length > COLUMNS.length && !this.asked.run;
  }

  /** By how many places the first row that is seen has moved, where it is among new ones that begin at a place. */
  private moved(rows: source.Row[], begin: number): number {
    const top = Math.floor(this.view.scrollTop / ROW);
    const first = this.chunks.get(Math.floor(top / CHUNK))?.[top % CHUNK];
    const place = first ? rows.findIndex((row) => named(row) === named(first)) : -1;
    return place < 0 ? 0 : begin + place - top;
  }

  private header(): void {
    this.head.replaceChildren(...this.columns.map((column) => {
      const sorted = this.asked.sort === column.key;
      const down = this.asked.descending === "1";
      const cell = h("span", { role: "columnheader", class: `c-${column.key}`, "aria-sort": sorted ? (down ? "descending" : "ascending") : "none" });
      cell.append(column.sorts
        ? h("button", { type: "button", onclick: () => this.sort(column.key) }, column.title + (sorted ? (down ? " ↓" : " ↑") : ""))
        : column.title);
      return cell;
    }));
  }

  private sort(key: string): void {
    const turned = this.asked.sort === key && this.asked.descending === "1";
    this.sorted({ sort: key, descending: turned ? "0" : "1" });
  }

  /** The places that are seen, and some above and below. */
  private seen(): { first: number; last: number } {
    const first = Math.max(0, Math.floor(this.view.scrollTop / ROW) - AHEAD);
    return { first, last: first + Math.ceil((this.view.clientHeight || 600) / ROW) + 2 * AHEAD };
  }

  private row(place: number): source.Row | undefined {
    const chunk = Math.floor(place / CHUNK);
    const found = this.chunks.get(chunk);
    if (!found) void this.ask(chunk);
    return found?.[place - chunk * CHUNK];
  }

  private ask(chunk: number): Promise<source.Row[]> {
    const under = this.asking.get(chunk) ?? this.fetched(chunk);
    this.asking.set(chunk, under);
    return under;
  }

  private async fetched(chunk: number): Promise<source.Row[]> {
    const generation = this.generation;
    try {
      const { rows } = await source.rollouts(this.asked, chunk * CHUNK, CHUNK);
      if (generation === this.generation) {
        this.take(chunk, rows);
        this.draw();
      }
      return rows;
    } catch (error) {
      if (generation === this.generation) this.fault(error);
      return [];
    } finally {
      if (generation === this.generation) this.asking.delete(chunk);
    }
  }

  private take(chunk: number, rows: source.Row[]): void {
    this.chunks.set(chunk, rows);
    const place = rows.findIndex((row) => named(row) === this.picked);
    if (place >= 0) this.place = chunk * CHUNK + place;
  }

  private fault(error: unknown): void {
    this.count.textContent = String(error);
    this.count.classList.add("bad");
  }

  private draw(): void {
    const { first, last } = this.seen();
    this.rows.style.height = `${this.total * ROW}px`;
    const drawn: HTMLElement[] = [];
    for (let place = first; place < Math.min(this.total, last); place++) {
      const row = this.row(place);
      const line = row ? this.line(row, place) : h("div", { class: "row", role: "row" });
      const marked = !!row && named(row) === this.picked;
      line.classList.toggle("picked", marked);
      line.setAttribute("aria-selected", String(marked));
      line.style.transform = `translateY(${place * ROW}px)`;
      drawn.push(line);
    }
    lay(this.rows, drawn);
  }

  /** The element of a row, made once. */
  private line(row: source.Row, place: number): HTMLElement {
    const cells = (): HTMLElement[] =>
      this.columns.map((column) => h("span", { role: "gridcell", class: `c-${column.key}` }, column.of(row).slice(0, 300)));
    const made = this.lines.get(row) ?? h("div", { class: "row", role: "row", onclick: () => void this.pick(place) }, cells());
    this.lines.set(row, made);
    return made;
  }

  /** Marks the rollout at a place, and opens it. */
  private async pick(wanted: number): Promise<void> {
    if (!this.total) return;
    const pick = ++this.picks;
    const place = this.place = Math.min(Math.max(wanted, 0), this.total - 1);
    const chunk = Math.floor(place / CHUNK);
    const top = place * ROW;
    const height = this.view.clientHeight - ROW;
    if (top < this.view.scrollTop) this.view.scrollTop = top;
    if (top > this.view.scrollTop + height - ROW) this.view.scrollTop = top - height + ROW;
    this.picked = "";
    const row = this.row(place) ?? (await this.ask(chunk))[place - chunk * CHUNK];
    if (!row || pick !== this.picks) return;
    this.picked = named(row);
    this.draw();
    this.open(row);
  }

  private key(event: KeyboardEvent): void {
    const page = Math.max(1, Math.floor(this.view.clientHeight / ROW) - 2);
    const moves: Record<string, number> = { ArrowDown: 1, ArrowUp: -1, j: 1, k: -1, PageDown: page, PageUp: -page };
    const by = moves[event.key];
    if (by !== undefined) void this.pick(this.place + by);
    else if (event.key === "Home") void this.pick(0);
    else if (event.key === "End") void this.pick(this.total - 1);
    else return;
    event.preventDefault();
  }
}

/** What tells a rollout from all others. */
function named(row: source.Row): string {
  return `${row.run}/${row.number}`;
}

/** Gives an element its children. Those that stay are not touched: a press on one becomes a click. */
function lay(under: HTMLElement, wanted: HTMLElement[]): void {
  const stay = new Set<Element>(wanted);
  for (const each of [...under.children]) if (!stay.has(each)) each.remove();
  wanted.forEach((each, place) => {
    const there = under.children[place];
    if (there !== each) under.insertBefore(each, there ?? null);
  });
}
