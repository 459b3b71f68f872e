// The sentinels: each rule with its bound, its history, and the rollouts of the steps where it fired.

import { chart, type Line } from "./chart";
import { h, short } from "./dom";
import * as source from "./source";

const MOST_SPANS = 1000; // of steps that are asked for at once
const MOST_SAID = 12; // of them in words

/** The page. */
export async function page(): Promise<HTMLElement> {
  const [told, rules] = await Promise.all([source.overview(), source.health()]);
  const fired = (rule: source.Rule): number =>
    rule.runs.reduce((sum, run) => sum + run.fired.length, 0);
  rules.sort((one, other) => Number(fired(other) > 0) - Number(fired(one) > 0));
  const firing = rules.filter(fired).length;
  return h(
    "div",
    { class: "page" },
    h("p", { class: firing ? "bad" : "good" }, firing ? `${firing} of ${rules.length} sentinels have fired.` : "No sentinel has fired."),
    h("section", { class: "charts" }, rules.map((rule) => card(rule, told.runs))),
  );
}

function card(rule: source.Rule, runs: source.Run[]): HTMLElement {
  const lines = rule.runs.map((points, run): Line => ({ name: runs[run]!.name, points, colour: run }));
  const spans = rule.runs.flatMap((run) => run.fired);
  const off = rule.runs.every((run) => run.action === "off");
  const { shared, levels, said } = bounds(rule, runs);
  return h(
    "article",
    { class: "card rule" },
    h("h2", {}, rule.name, h("span", { class: spans.length ? "badge bad" : "badge" }, spans.length ? "fired" : off ? "off" : "quiet")),
    h("p", {}, `Fires where ${rule.gauge} is ${rule.condition}: ${rule.means}.`),
    chart({ title: rule.gauge, lines: [...lines, ...levels], spans, bound: shared }),
    said ? h("p", { class: "soft bound" }, `bound: ${said}`) : null,
    rule.runs.map((run, number) => (Object.keys(run.asked).length ? caused(rule, run, number, runs) : null)),
    spans.length ? h("p", { class: "soft" }, `What to do: ${rule.remedy}.`) : null,
  );
}

/** A link to the rollouts that had a rule fire. */
function caused(rule: source.Rule, run: source.RuleOfRun, number: number, runs: source.Run[]): HTMLElement {
  const spans = run.fired.slice(run.asked.steps ? -MOST_SPANS : -1); // of a time: the last
  const said = spans.map(([first, last]) => (first === last ? `${first}` : `${first}-${last}`));
  const count = spans.reduce((sum, [first, last]) => sum + last - first + 1, 0);
  const steps = count === 1 ? `step ${said[0]}` : `${count.toLocaleString()} steps: ${said.slice(0, MOST_SAID).join(", ")}${said.length > MOST_SAID ? ", …" : ""}`;
  const which = run.asked.which && source.WHICH[run.asked.which]?.said;
  const words = [
    `rollouts ${run.asked.steps ? "of" : "under way when it last fired, at"} ${steps}${which ? ` (${which})` : ""}`,
    ...(runs.length > 1 ? [runs[number]!.name] : []),
  ].join(", ");
  return h("p", {}, h("a", { id: `fired-${rule.name}-${number}`, href: `#rollouts?${new URLSearchParams(run.asked)}` }, words));
}

/** The bound of a rule: one that all runs share, else a dashed level for each that has one; and in words. */
function bounds(rule: source.Rule, runs: source.Run[]): { shared: number | null; levels: Line[]; said: string } {
  const shared = rule.runs[0]!.bound;
  if (rule.runs.every(({ bound }) => bound === shared)) return { shared, levels: [], said: shared === null ? "" : short(shared) };
  const bounded = rule.runs.map(({ bound, steps }, run) => ({ bound, steps, run, name: runs[run]!.name })).filter(({ bound }) => bound !== null);
  return {
    shared: null,
    levels: bounded.filter(({ steps }) => steps.length).map(({ bound, steps, run, name }) => (
      { name: `${name} bound`, points: { steps: [steps[0]!, steps[steps.length - 1]!], values: [bound, bound] }, colour: run, dashed: true })),
    said: bounded.map(({ bound, name }) => `${short(bound)} of ${name}`).join(", "),
  };
}
