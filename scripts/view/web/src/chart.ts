// Line charts over steps, with the run's events and a bound where there is one.

import uPlot from "uplot";
import "uplot/dist/uPlot.min.css";
import { h, short } from "./dom";
import type { Points } from "./source";

export interface Line { name: string; points: Points; colour: number; dashed?: boolean; dots?: boolean }
export interface Mark { step: number; kind: string }
export interface Options {
  title: string;
  lines: Line[];
  marks?: Mark[];
  spans?: [number, number][];
  bound?: number | null;
  ceiling?: number;
}

const HEIGHT = 170;
const drawn: { title: string; chart: uPlot; place: HTMLElement }[] = [];

/** What a reader has made of a chart: the steps looked at, if not all, and the curves hidden. */
interface Look { steps: { min: number; max: number } | null; hidden: Set<string> }

/** The value of a colour of the style sheet. */
export function colour(name: string): string {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

/** A figure with a chart in it, as wide as its place. */
export function chart(options: Options): HTMLElement {
  const place = h("div", { class: "plot" });
  const figure = h("figure", {}, h("figcaption", {}, options.title), place);
  const lines = options.lines.filter((line) => line.points.steps.length);
  if (!lines.length) {
    place.append(h("p", { class: "none" }, "nothing yet"));
    return figure;
  }
  const data = uPlot.join(
    lines.map((line) => [line.points.steps, line.points.values] as uPlot.AlignedData),
  );
  queueMicrotask(() => {
    const made = new uPlot(settings(options, lines, place.clientWidth || 320), data, place);
    drawn.push({ title: options.title, chart: made, place });
  });
  return figure;
}

/** What readers have made of the charts that are shown, by title. */
export function looks(): Map<string, Look> {
  return new Map(drawn.filter(({ place }) => place.isConnected).map(({ title, chart: { data, scales, series } }) => {
    const [steps, { min, max }] = [data[0], scales.x!];
    const closer = min != null && max != null && (min > steps[0]! || max < steps[steps.length - 1]!);
    const hidden = series.slice(1).filter((each) => !each.show).map((each) => String(each.label));
    return [title, { steps: closer ? { min, max } : null, hidden: new Set(hidden) }];
  }));
}

/** Has the charts that are shown look as those of the same title did. */
export function lookAgain(before: Map<string, Look>): void {
  for (const { title, chart } of drawn) {
    const look = before.get(title);
    if (!look) continue;
    chart.series.forEach((each, place) => {
      if (place && look.hidden.has(String(each.label))) chart.setSeries(place, { show: false });
    });
    if (look.steps) chart.setScale("x", look.steps);
  }
}

/** Forgets the charts that are no longer shown, and fits the others to their places. */
export function fit(): void {
  for (let n = drawn.length - 1; n >= 0; n--) {
    const each = drawn[n]!;
    if (!each.place.isConnected) {
      each.chart.destroy();
      drawn.splice(n, 1);
    } else if (each.place.clientWidth && each.place.clientWidth !== each.chart.width) {
      each.chart.setSize({ width: each.place.clientWidth, height: HEIGHT });
    }
  }
}

function settings(options: Options, lines: Line[], width: number): uPlot.Options {
  const axis = { stroke: colour("--soft"), grid: { stroke: colour("--line"), width: 1 } };
  return {
    width,
    height: HEIGHT,
    scales: {
      x: { time: false },
      y: options.ceiling === undefined ? {} : { range: [0, options.ceiling] },
    },
    axes: [
      { ...axis, size: 30 },
      { ...axis, size: 62, values: (_, splits) => splits.map((each) => short(each)) },
    ],
    series: [
      { label: "step" },
      ...lines.map((line) => ({
        label: line.name,
        stroke: colour(`--series-${line.colour % 8}`),
        width: 1.6,
        dash: line.dashed ? [5, 4] : undefined,
        spanGaps: true,
        points: { show: line.dots ?? false, size: 5 },
        value: (_: uPlot, value: number | null | undefined) => short(value),
      })),
    ],
    hooks: { drawClear: [(u) => shade(u, options)], draw: [(u) => mark(u, options)] },
    cursor: { sync: { key: "steps" }, drag: { x: true, y: false }, hover: { skip: [] } }, // no value of another step
  };
}

function shade(u: uPlot, options: Options): void {
  u.ctx.fillStyle = colour("--alarm");
  for (const [first, last] of options.spans ?? []) {
    const left = u.valToPos(first - 0.5, "x", true);
    const right = u.valToPos(last + 0.5, "x", true);
    u.ctx.fillRect(left, u.bbox.top, Math.max(2, right - left), u.bbox.height);
  }
}

function mark(u: uPlot, options: Options): void {
  const { ctx, bbox } = u;
  ctx.save();
  ctx.beginPath();
  ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
  ctx.clip();
  ctx.setLineDash([2, 3]);
  const places = new Map<string, Set<number>>(); // by kind: of a thousand events a few are pixels apart
  for (const { kind, step } of options.marks ?? []) {
    const x = Math.round(u.valToPos(step, "x", true));
    places.set(kind, (places.get(kind) ?? new Set()).add(x));
  }
  for (const [kind, found] of places) {
    ctx.strokeStyle = colour(`--event-${kind}`) || colour("--soft");
    for (const x of found) stroke(ctx, x, bbox.top, x, bbox.top + bbox.height);
  }
  if (options.bound !== null && options.bound !== undefined) {
    ctx.strokeStyle = colour("--bad");
    const y = u.valToPos(options.bound, "y", true);
    stroke(ctx, bbox.left, y, bbox.left + bbox.width, y);
  }
  ctx.restore();
}

function stroke(ctx: CanvasRenderingContext2D, ...[a, b, c, d]: [number, number, number, number]): void {
  ctx.beginPath();
  ctx.moveTo(a, b);
  ctx.lineTo(c, d);
  ctx.stroke();
}

window.addEventListener("resize", fit);
