// Lanes drawn one below the other over the same time, with a cursor that mouse and keys move.

import { colour } from "./chart";
import { h, short } from "./dom";
import type { Lane, Timeline } from "./source";

export interface View { from: number; to: number }
interface Acts {
  moved: (view: View) => void;
  pointed: (said: string) => void;
  chosen: (lane: Lane | null, from: number, to: number) => void;
  whole: () => void;
}
interface Drawn { title: string; lane: Lane | null; height: number; row: HTMLElement; canvas: HTMLCanvasElement; draw: (pen: Pen) => void }
interface Pen { ctx: CanvasRenderingContext2D; width: number; height: number; x: (at: number) => number }

const NEAR = 5; // pixels
const CLICK = 4; // pixels that a click may move
const SHARES = ["kv", "untold"]; // states that are shares of 1: a line over the others, and their ground
const ACROSS = ["restart", "checkpoint", "rollback", "stop", "sentinel", "refit"]; // events drawn through all lanes
const STEPS_S = [
  0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400,
  172800, 604800,
];

export class Lanes {
  readonly element = h("div", { class: "lanes", tabindex: "0", role: "application", "aria-label": "Lanes", "aria-describedby": "lane-keys" });
  private drawn: Drawn[] = [];
  private found: Timeline | null = null;
  private view: View = { from: 0, to: 1 };
  private cursor: { lane: number; at: number } | null = null;
  private held: { x: number; view: View; moved: boolean } | null = null;

  constructor(private readonly acts: Acts) {
    const { element } = this;
    element.addEventListener("keydown", (event) => this.key(event));
    element.addEventListener("wheel", (event) => this.wheel(event), { passive: false });
    element.addEventListener("pointerdown", (event) => this.press(event));
    element.addEventListener("pointermove", (event) => this.drag(event));
    element.addEventListener("pointerup", (event) => this.release(event));
    element.addEventListener("pointercancel", () => { this.held = null; });
    new ResizeObserver(() => this.draw()).observe(element);
  }

  /** Shows what was found, between two times. */
  show(found: Timeline | null, view: View): void {
    this.view = view;
    if (found && found !== this.found) this.build(found);
    this.draw();
    if (this.cursor && !this.held) this.tell();
  }

  /** Looks from so many times as far away. */
  zoom(factor: number, at = this.place()): void {
    const { from, to } = this.view;
    this.acts.moved({ from: at - (at - from) * factor, to: at + (to - at) * factor });
  }

  /** Moves by a share of what is seen. */
  pan(share: number): void {
    const by = (this.view.to - this.view.from) * share;
    this.acts.moved({ from: this.view.from + by, to: this.view.to + by });
  }

  /** The time of the cursor; where it is not seen, the middle. */
  private place(): number {
    const { cursor, view } = this;
    return cursor && cursor.at >= view.from && cursor.at <= view.to ? cursor.at : (view.from + view.to) / 2;
  }

  private build(found: Timeline): void {
    this.found = found;
    const tops: Record<string, number> = { actor: 1, engine: 1, learner: 1, replay: 1, retrieval: 1, apply: 1 };
    for (const lane of found.lanes) {
      for (let n = 0; n < found.bins; n++) {
        const sum = lane.states.reduce((all, { name, levels }) => all + (SHARES.includes(name) ? 0 : levels[n]!), 0);
        if (lane.kind !== "learner") tops[lane.kind] = Math.max(tops[lane.kind]!, sum);
      }
    }
    const rows: [string, Lane | null, string, number, (pen: Pen) => void][] = [
      ["events", null, "", 22, (pen) => this.marks(pen)],
      ...found.lanes.map((lane): [string, Lane, string, number, (pen: Pen) => void] => [
        titled(lane),
        lane,
        `busy ${share(lane.busy.mean)}, ${means(lane)}`,
        ["learner", "apply"].includes(lane.kind) ? 26 : 40,
        (pen) => this.bars(pen, lane, tops[lane.kind]!),
      ]),
      ["versions", null, "", 22, (pen) => this.versions(pen)],
      ["", null, "", 22, (pen) => this.axis(pen)],
    ];
    this.drawn = rows.map(([title, lane, said, height, draw]) => {
      const canvas = h("canvas", { "aria-hidden": "true" });
      const label = h("div", { class: "label" }, h("strong", { title }, title), said ? h("span", { class: "soft" }, said) : null);
      return { title, lane, height, canvas, draw, row: h("div", { class: `lane${title ? "" : " axis"}` }, label, canvas) };
    });
    this.element.replaceChildren(...this.drawn.map((each) => each.row));
  }

  private draw(): void {
    const sharp = window.devicePixelRatio || 1;
    for (const [n, { canvas, height, draw, row, title }] of this.drawn.entries()) {
      const width = canvas.clientWidth;
      if (!width) continue;
      canvas.width = width * sharp;
      canvas.height = height * sharp;
      canvas.style.height = `${height}px`;
      row.classList.toggle("picked", this.cursor?.lane === n);
      const ctx = canvas.getContext("2d")!;
      ctx.scale(sharp, sharp);
      const pen = { ctx, width, height, x: (at: number) => ((at - this.view.from) / (this.view.to - this.view.from)) * width };
      draw(pen);
      if (title) this.across(pen);
      if (this.cursor) line(pen, this.cursor.at, colour("--ink"));
    }
  }

  private bars({ ctx, height, x }: Pen, lane: Lane, top: number): void {
    const { from, to, width, bins } = this.found!;
    const sharp = window.devicePixelRatio || 1;
    const edge = (n: number): number => Math.round(x(Math.min(from + n * width, to)) * sharp) / sharp; // no seams
    const floors = new Float64Array(bins).fill(height);
    for (const { name, levels } of lane.states) {
      ctx.fillStyle = colour(`--lane-${name}`);
      if (SHARES.includes(name)) {
        for (let n = 0; n < bins; n++) {
          if (levels[n]! <= 0) continue;
          const tall = (1 - levels[n]!) * (height - 2);
          ctx.fillRect(edge(n), tall, edge(n + 1) - edge(n), name === "kv" ? 2 : height - tall);
        }
        continue;
      }
      for (let n = 0; n < bins; n++) {
        const size = (levels[n]! / top) * (height - 1);
        if (size <= 0) continue;
        const tall = floors[n]! - size;
        ctx.fillRect(edge(n), tall, edge(n + 1) - edge(n), size);
        floors[n] = tall;
      }
    }
  }

  private marks({ ctx, height, x }: Pen): void {
    const { marks } = this.found!;
    for (const { at, kind } of marks.filter((each) => each.kind === "group")) {
      ctx.fillStyle = colour(`--event-${kind}`);
      ctx.fillRect(x(at), height - 8, 1, 6); // there are many
    }
    for (const { at, kind } of marks.filter((each) => each.kind !== "group")) {
      ctx.fillStyle = colour(`--event-${kind}`) || colour("--soft");
      ctx.beginPath();
      ctx.moveTo(x(at) - 4, 2);
      ctx.lineTo(x(at) + 4, 2);
      ctx.lineTo(x(at), height - 8);
      ctx.fill();
    }
  }

  private across(pen: Pen): void {
    pen.ctx.setLineDash([2, 3]);
    for (const { at, kind } of this.found!.marks) {
      if (ACROSS.includes(kind)) line(pen, at, colour(`--event-${kind}`));
    }
    pen.ctx.setLineDash([]);
  }

  private versions({ ctx, width, height, x }: Pen): void {
    const { versions } = this.found!;
    ctx.font = "11px system-ui, sans-serif";
    ctx.textBaseline = "middle";
    for (const [n, [at, version]] of versions.entries()) {
      const left = Math.max(x(at), 0);
      const right = Math.min(n + 1 < versions.length ? x(versions[n + 1]![0]) : x(this.found!.last), width);
      if (right <= left) continue;
      ctx.fillStyle = colour(n % 2 ? "--picked" : "--line");
      ctx.fillRect(left, 2, Math.max(right - left, 0.5), height - 4);
      if (right - left > 8 + 7 * String(version).length) {
        ctx.fillStyle = colour("--ink");
        ctx.fillText(String(version), left + 4, height / 2);
      }
    }
  }

  private axis({ ctx, width, height, x }: Pen): void {
    const { from, to } = this.view;
    const room = Math.max(2, Math.floor(width / 90));
    const step = STEPS_S.find((each) => (to - from) / each <= room) ?? 2 * 604800;
    const shift = new Date(from * 1000).getTimezoneOffset() * 60;
    ctx.font = "11px system-ui, sans-serif";
    ctx.textBaseline = "bottom";
    ctx.textAlign = "center";
    ctx.fillStyle = ctx.strokeStyle = colour("--soft");
    for (let n = Math.ceil((from - shift) / step); n * step + shift <= to; n++) {
      const place = x(n * step + shift);
      ctx.fillRect(place, 0, 1, 5);
      const said = clock(n * step + shift, step);
      const half = ctx.measureText(said).width / 2;
      if (place - half >= 0 && place + half <= width) ctx.fillText(said, place, height - 1);
    }
  }

  private tell(): void {
    const { cursor, found } = this;
    if (!cursor || !found) return;
    const place = this.drawn[cursor.lane];
    const bin = Math.floor((cursor.at - found.from) / found.width);
    const said = [`${clock(cursor.at, Math.min(found.width, 1))}, ${place?.title ?? ""}`];
    if (place?.lane && bin >= 0 && bin < found.bins) {
      said.push(place.lane.states.map(({ name, levels }) => `${name} ${SHARES.includes(name) ? share(levels[bin]!) : short(levels[bin])}`).join(", "));
    }
    const version = found.versions.filter(([at]) => at <= cursor.at).at(-1);
    if (version) said.push(`version ${version[1]}`);
    const near = (NEAR / (place?.canvas.clientWidth || 1)) * (this.view.to - this.view.from);
    const events = found.marks.filter(({ at }) => Math.abs(at - cursor.at) <= near);
    said.push(...events.slice(0, 5).map((each) => (each.count > 1 ? `${each.count} of kind ${each.kind}: ${each.said}, …` : each.said)));
    this.acts.pointed(said.join("; "));
  }

  private point(lane: number, at: number): void {
    this.cursor = { lane: Math.min(Math.max(lane, 0), this.drawn.length - 2), at };
    this.draw();
    this.tell();
  }

  private choose(): void {
    const { cursor, found } = this;
    if (!cursor || !found) return;
    const from = found.from + Math.floor((cursor.at - found.from) / found.width) * found.width;
    this.acts.chosen(this.drawn[cursor.lane]?.lane ?? null, from, Math.min(from + found.width, found.to));
  }

  private under(event: MouseEvent): { lane: number; at: number } | null {
    const lane = this.drawn.findIndex(({ row }) => row.contains(event.target as Node));
    const box = this.drawn[Math.max(lane, 0)]?.canvas.getBoundingClientRect();
    if (lane < 0 || !box?.width || event.clientX < box.left || event.clientX > box.right) return null;
    return { lane, at: this.view.from + ((event.clientX - box.left) / box.width) * (this.view.to - this.view.from) };
  }

  private wheel(event: WheelEvent): void {
    const place = this.under(event);
    if (!place) return;
    event.preventDefault();
    if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) this.pan(event.deltaX / 1000);
    else this.zoom(Math.exp(Math.min(Math.max(event.deltaY, -200), 200) / 300), place.at);
  }

  private press(event: PointerEvent): void {
    if (event.button || !this.under(event)) return;
    this.held = { x: event.clientX, view: this.view, moved: false };
    this.element.setPointerCapture(event.pointerId);
  }

  private drag(event: PointerEvent): void {
    const place = this.under(event);
    if (!this.held) {
      if (place) this.point(place.lane, place.at);
      return;
    }
    const { x, view } = this.held;
    const width = this.drawn[0]?.canvas.clientWidth || 1;
    if (Math.abs(event.clientX - x) > CLICK) this.held.moved = true;
    if (!this.held.moved) return;
    const by = ((x - event.clientX) / width) * (view.to - view.from);
    this.acts.moved({ from: view.from + by, to: view.to + by });
  }

  private release(event: PointerEvent): void {
    const { held } = this;
    this.held = null;
    if (!held || held.moved) return;
    const target = document.elementFromPoint(event.clientX, event.clientY);
    const lane = this.drawn.findIndex(({ row }) => row.contains(target));
    const box = this.drawn[0]?.canvas.getBoundingClientRect();
    if (lane < 0 || lane === this.drawn.length - 1 || !box) return;
    this.point(lane, this.view.from + ((event.clientX - box.left) / box.width) * (this.view.to - this.view.from));
    this.choose();
  }

  private key(event: KeyboardEvent): void {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const { found, view } = this;
    const at = this.place();
    const lane = this.cursor?.lane ?? 1;
    const within = (by: number): void => {
      const next = Math.min(Math.max(at + by * (found?.width ?? 0), view.from), view.to);
      this.point(lane, next);
    };
    const acts: Record<string, () => void> = {
      ArrowLeft: () => (event.shiftKey ? within(-1) : this.pan(-0.1)),
      ArrowRight: () => (event.shiftKey ? within(1) : this.pan(0.1)),
      ArrowUp: () => this.point(lane - 1, at),
      ArrowDown: () => this.point(this.cursor ? lane + 1 : lane, at),
      "+": () => this.zoom(0.5, at),
      "=": () => this.zoom(0.5, at),
      "-": () => this.zoom(2, at),
      "0": () => this.acts.whole(),
      Home: () => this.acts.whole(),
      Enter: () => this.choose(),
    };
    const act = acts[event.key];
    if (!act) return;
    act();
    event.preventDefault();
    event.stopPropagation();
  }
}

function line({ ctx, height, x }: Pen, at: number, stroke: string): void {
  ctx.strokeStyle = stroke;
  ctx.beginPath();
  ctx.moveTo(x(at), 0);
  ctx.lineTo(x(at), height);
  ctx.stroke();
}

function share(value: number): string {
  return `${(value * 100).toFixed(value > 0 && value < 0.01 ? 1 : 0)} %`;
}

function titled({ kind, name, others }: Lane): string {
  if (kind === "engine") return others ? `${others} engines` : `${name}: engine`;
  return others ? `${others} more actors` : name;
}

/** The states of a lane on average: shares of the learner's time, of a cache, untold; else how many. */
function means(lane: Lane): string {
  const said = lane.states.filter(({ mean }) => mean >= 0.0005).map(({ name, mean }) =>
    `${name} ${lane.kind === "learner" || SHARES.includes(name) ? share(mean) : short(Number(mean.toPrecision(2)))}`);
  return said.join(", ") || "nothing";
}

/** The time of day as exact as a step needs; the day where a step is one. */
export function clock(at: number, step: number): string {
  const date = new Date(at * 1000);
  if (step >= 86400) return date.toLocaleDateString();
  const digits = step >= 1 ? 0 : step >= 0.1 ? 1 : step >= 0.01 ? 2 : 3;
  return date.toLocaleTimeString(undefined, {
    hour: "2-digit", minute: "2-digit", hour12: false,
    ...(step < 60 ? { second: "2-digit" } : {}),
    ...(digits ? { fractionalSecondDigits: digits as 1 | 2 | 3 } : {}),
  });
}
