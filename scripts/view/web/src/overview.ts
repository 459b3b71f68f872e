// The first page: where each run stands, its curves over each other, and what has happened.

import { chart, type Line, type Mark } from "./chart";
import { h, lasting, moment, short } from "./dom";
import * as source from "./source";

interface Panel { title: string; gauges: string[]; parts?: string; ceiling?: number; forecast?: boolean }

const PANELS: Panel[] = [
  { title: "Reward of rollouts since the last batch (its parts over the last 256 of each actor, dashed)", gauges: ["actor/reward"], parts: "actor/reward/" },
  { title: "Searches a rollout", gauges: ["actor/searches_per_rollout"] },
  { title: "Tokens of the policy, a rollout", gauges: ["view/tokens_per_rollout"] },
  { title: "Turns of a rollout", gauges: ["view/turns_per_rollout"] },
  { title: "Tokens a second: sampled; trained, dashed", gauges: ["actor/tokens_per_s", "learner/tokens_per_s"] },
  { title: "Staleness (mean; most, dashed)", gauges: ["replay/staleness", "replay/staleness_max"] },
  { title: "Steps of staleness before the queue; in it, dashed", gauges: ["view/staleness_before_queue", "view/staleness_in_queue"], forecast: true },
  { title: "Groups without signal", gauges: ["replay/no_signal_fraction"], ceiling: 1 },
  { title: "Groups dropped so far", gauges: [], parts: "replay/dropped_" },
  { title: "Learner waits for a batch, s", gauges: ["learner/wait_for_batch_s"] },
  { title: "Learner's step, s", gauges: ["learner/update_s"] },
  { title: "Pause for new weights, s", gauges: ["sync/generation_pause_s"] },
  { title: "KV cache in use, at most", gauges: ["actor/kv_use_max"], ceiling: 1 },
  { title: "Loss", gauges: ["learner/loss"] },
  { title: "Entropy", gauges: ["learner/entropy"] },
];
const MARKED = ["restart", "checkpoint", "rollback", "stop", "sentinel", "refit", "drop"];
const MOST_PARTS = 8; // of a panel
const MOST_EVENTS = 200; // in the table of a run
const EXACT = "Exact match, held out";
let chosen = "";

/** The page. */
export async function page(): Promise<HTMLElement> {
  const told = await source.overview();
  const extra = told.gauges.includes(chosen) ? [chosen] : [];
  const named = ({ gauges, parts }: Panel): string[] => [
    ...gauges, ...told.gauges.filter((gauge) => parts && gauge.startsWith(parts)).slice(0, MOST_PARTS),
  ];
  const found = await source.curves([...new Set([...PANELS.flatMap(named), ...extra])]);
  const marks = told.runs.flatMap(marksOf);
  const lines = (gauges: string[], apart = false): Line[] =>
    gauges.flatMap((gauge, place) =>
      (found[gauge] ?? []).map((points, run) => ({
        name: told.runs.length > 1 ? `${told.runs[run]!.name}${place ? ` ${gauge}` : ""}` : gauge,
        points,
        colour: apart && told.runs.length === 1 ? place : run,
        dashed: place > 0,
      })),
    );
  return h(
    "div",
    { class: "page" },
    h("section", { class: "runs", "aria-label": "Runs" }, told.runs.map(card)),
    h(
      "section",
      { class: "charts", "aria-label": "Curves" },
      chart({ title: EXACT, lines: told.runs.flatMap(exactMatch), marks, ceiling: 1 }),
      told.runs.length > 1 ? apart(told.runs).map(([part, lines]) => chart({ title: `${EXACT}: ${part}`, lines, marks, ceiling: 1 })) : null,
      PANELS.map((panel) => {
        const shown = lines(named(panel), !!panel.parts);
        const told_before = panel.forecast ? told.runs.flatMap((run, n, all) => forecast(run, n, all, shown)) : [];
        return chart({ title: panel.title, lines: [...shown, ...told_before], marks, ceiling: panel.ceiling });
      }),
      extra.length ? chart({ title: chosen, lines: lines(extra), marks }) : null,
    ),
    picker(told.gauges),
    h("section", { "aria-label": "Events" }, h("h2", {}, "Events"), told.runs.map((run) => events(run, told.runs.length > 1))),
  );
}

function card(run: source.Run, number: number): HTMLElement {
  const best = Math.max(...run.evaluations.map((each) => each.em), -1);
  const last = run.evaluations.at(-1);
  const facts: [string, string][] = [
    ["state", !run.state && run.damage ? "damaged log" : run.state + (run.stopped && run.stopped !== run.state ? `: ${run.stopped}` : "")],
    ["step", run.steps ? `${run.step} of ${run.steps}` : String(run.step)],
    ["exact match", last ? `${short(last.em)} at step ${last.step}, ${last.questions} questions (best ${short(best)})` : "no evaluation yet"],
    ["lasted", lasting(run.last - run.first)],
    ["objective", run.objective],
    ["environment", run.environment],
    ["model", run.model],
    ["records", run.records.toLocaleString()],
  ];
  return h(
    "article",
    { class: "card" },
    h("h2", { title: run.path }, h("span", { class: `swatch s${number % 8}` }), run.name),
    run.damage ? h("p", { class: "bad", role: "alert" }, `Told up to here: ${run.damage}`) : null,
    run.trouble ? h("p", { class: "bad", role: "alert" }, `Not read on: ${run.trouble}`) : null,
    beingRead(run) ? h("p", { role: "status" }, `Being read: ${Math.floor((100 * run.read) / run.size)} %`) : null,
    h("dl", {}, facts.filter(([, value]) => value).map(([name, value]) => [h("dt", {}, name), h("dd", { title: value }, value)]).flat()),
  );
}

/** True while a server has much of a run's log before it. */
function beingRead(run: source.Run): boolean {
  return run.read < 0.99 * run.size && !run.damage && !run.trouble && !source.isFile;
}

type Part = [string, (number | null)[]];

/** Exact match of each evaluation of a run, by hops and by set. */
function parts(run: source.Run): { hops: Part[]; sets: Part[] } {
  const of = (by: "em_by_hops" | "em_by_set"): Part[] =>
    [...new Set(run.evaluations.flatMap((each) => Object.keys(each[by])))].sort()
      .map((name) => [name, run.evaluations.map((each) => each[by][name] ?? null)]);
  const hops = of("em_by_hops").filter(([name]) => name !== "0");
  return { hops: hops.map(([name, values]) => [name === "1" ? "1 hop" : `${name} hops`, values]), sets: of("em_by_set") };
}

function exactMatch(run: source.Run, number: number, all: source.Run[]): Line[] {
  const steps = run.evaluations.map((each) => each.step);
  const named = all.length > 1 ? `${run.name} ` : "";
  const line = (name: string, values: (number | null)[], colour: number, dashed = false): Line => ({
    name: `${named}${name}`, points: { steps, values }, colour, dashed, dots: true,
  });
  const found = [line("EM", run.evaluations.map((each) => each.em), number)];
  if (all.length === 1) {
    const { hops, sets } = parts(run);
    hops.forEach(([name, values], place) => found.push(line(name, values, place + 1)));
    sets.forEach(([name, values], place) => found.push(line(name, values, hops.length + place + 1, true)));
  }
  if (run.evaluations.some((each) => each.sampled_em !== null)) {
    found.push(line("sampled", run.evaluations.map((each) => each.sampled_em), number, true));
  }
  return found;
}

/** Exact match by hops and by set, each with a line a run. */
function apart(runs: source.Run[]): [string, Line[]][] {
  const found = runs.map(parts);
  const by = (way: "hops" | "sets"): [string, Line[]][] =>
    [...new Set(found.flatMap((each) => each[way].map(([name]) => name)))].sort().slice(0, MOST_PARTS)
      .map((part) => [part, runs.flatMap((run, number) => {
        const values = found[number]![way].find(([name]) => name === part)?.[1];
        const steps = run.evaluations.map((each) => each.step);
        return values ? [{ name: run.name, points: { steps, values }, colour: number, dots: true }] : [];
      })]);
  return [...by("hops"), ...by("sets")];
}

/** The published forecast as levels over the steps that a run has. */
function forecast(run: source.Run, number: number, all: source.Run[], shown: Line[]): Line[] {
  const steps = shown.flatMap(({ points, colour }) => (colour === number ? points.steps : []));
  if (!run.forecast || !steps.length) return [];
  const ends = [Math.min(...steps), Math.max(...steps)];
  const named = all.length > 1 ? `${run.name} ` : "";
  return run.forecast.map((value, place) => ({
    name: `${named}forecast ${place ? "in it" : "before"}`,
    points: { steps: ends, values: [value, value] }, colour: all.length + 2 * number + place, dashed: true,
  }));
}

function marksOf(run: source.Run): Mark[] {
  return run.events.filter(({ kind }) => MARKED.includes(kind)).map(({ step, kind }) => ({ step, kind }));
}

function picker(gauges: string[]): HTMLElement {
  const select = h(
    "select",
    { id: "gauge", onchange: () => { chosen = select.value; window.dispatchEvent(new Event("again")); } },
    h("option", { value: "" }, "choose one of all"),
    gauges.map((name) => h("option", { value: name, selected: name === chosen }, name)),
  );
  return h("p", { class: "picker" }, h("label", { for: "gauge" }, "Another gauge: "), select);
}

/** How many of a run's events are shown. */
function bounded({ happened, events }: source.Run): string {
  const marked = happened > events.length ? ` Charts mark the newest ${events.length.toLocaleString()}.` : "";
  return `The newest ${MOST_EVENTS} of ${happened.toLocaleString()}.${marked}`;
}

function events(run: source.Run, named: boolean): HTMLElement {
  return h(
    "div",
    { class: "events" },
    named ? h("h3", {}, run.name) : null,
    h(
      "table",
      {},
      h("thead", {}, h("tr", {}, ["when", "step", "what"].map((each) => h("th", { scope: "col" }, each)))),
      h("tbody", {}, run.events.slice(0, MOST_EVENTS).map((each) =>
        h("tr", { class: `kind-${each.kind}` }, h("td", {}, moment(each.at)), h("td", { class: "n" }, String(each.step)), h("td", {}, each.said)),
      )),
    ),
    run.happened > MOST_EVENTS ? h("p", { class: "none" }, bounded(run)) : null,
  );
}
