// Where the pages' data come from: the server that gave the page, or the file that it is.

export interface Evaluation {
  step: number;
  at: number;
  em: number;
  sampled_em: number | null;
  em_by_hops: Record<string, number>;
  em_by_set: Record<string, number>;
  questions: number;
  searches: number;
}
export interface RunEvent { at: number; step: number; kind: string; said: string }
export interface Run {
  name: string; path: string; state: string; damage: string; trouble: string; read: number; size: number;
  records: number; step: number; steps: number; model: string; objective: string;
  environment: string; stopped: string; first: number; last: number;
  evaluations: Evaluation[]; events: RunEvent[]; happened: number; forecast: [number, number] | null;
}
export interface Overview { runs: Run[]; gauges: string[]; stops: string[] }
export interface Points { steps: number[]; values: (number | null)[] }
export type Curves = Record<string, Points[]>;
export interface RuleOfRun extends Points {
  bound: number | null;
  action: string;
  fired: [number, number][];
  asked: Asked; // the address's parameters of the rollouts that caused it; none: it has not fired
}
export interface Rule {
  name: string; gauge: string; condition: string; side: string; means: string; remedy: string;
  runs: RuleOfRun[];
}
export interface Row {
  run: number; number: number; at: number; kind: string; group_id: number; sibling: number;
  question_id: string; hops: number; question: string; expected: string; answer: string;
  reward: number | null; searches: number; turns: number; tokens: number; malformed: number;
  sequences: number; stop: string; oldest: number; newest: number; step: number | null;
  staleness: number | null; fate: string; gone: number; begun: number; actor: string;
  repeated: number; empty: number;
}
/** What is told apart of rollouts, in words, and by their rows. */
export const WHICH: Record<string, { said: string; of: (row: Row) => boolean }> = {
  repeated: { said: "repeated a search", of: (row) => row.repeated > 0 },
  empty: { said: "a search found nothing", of: (row) => row.empty > 0 },
  malformed: { said: "a malformed turn", of: (row) => row.malformed > 0 },
  limit: { said: "ended by a limit", of: (row) => ["turn_limit", "context_limit"].includes(row.stop) },
  dropped: { said: "dropped without signal", of: (row) => row.fate === "dropped: no_signal" },
};
/** What the learner made of each token; its fate is a place in FATES. */
export interface Learnt {
  current: (number | null)[]; proximal?: (number | null)[]; ratio: (number | null)[];
  weight: (number | null)[]; advantage: (number | null)[]; fate: number[];
}
export const FATES = ["trained", "clipped", "rejected", "masked"];
/** A part of what was read: a passage with its title, or what stands around passages. */
export interface Piece { title: string; id: string; text: string }
export interface Turn {
  tokens: string[]; left: number; logprobs: (number | null)[]; versions: number[]; observation: Piece[];
  malformed: boolean; reward: number; info: string; seconds: number; learnt?: Learnt;
  searches: { query: string; passages: string[]; seconds: number; status: string }[];
}
export interface Detail {
  gone?: string; lacks: string; unknown: string; parts: Record<string, number>; cause: string;
  timings: Record<string, number>; actor: string; attempt: number;
  sequences: { name: string; prompt: string; turns: Turn[] }[];
}
export interface Lane {
  kind: "actor" | "engine" | "learner" | "replay" | "retrieval" | "apply"; name: string; others?: number; busy: State; states: State[];
}
export interface State { name: string; mean: number; levels: number[] }
export interface Timeline {
  run: number; first: number; last: number; from: number; to: number; width: number; bins: number;
  lanes: Lane[]; versions: [number, number][]; sampled: boolean;
  marks: { at: number; kind: string; count: number; said: string }[];
}
export interface Waits { at: number | null; unseen: number; lines: { who: string; whom: string; what: string }[] }
export interface Rows { count: number; rows: Row[] }
export type Asked = Record<string, string>;

interface Embedded {
  overview: Overview; curves: Curves; health: { rules: Rule[] }; rollouts: Rows;
  timelines: Timeline[];
  details: Record<string, Detail>;
}

const text = document.getElementById("data")?.textContent;
const embedded: Embedded | null = text ? (JSON.parse(text) as Embedded) : null;

/** True on a page that is a file of its own. */
export const isFile = embedded !== null;

async function get<T>(path: string, asked: Asked = {}): Promise<T> {
  return told<T>(await fetch(`api/${path}?${new URLSearchParams(asked)}`));
}

/** What the server has answered; its fault, where it is one. */
async function told<T>(answer: Response): Promise<T> {
  const said = await answer.text();
  if (answer.ok) return JSON.parse(said) as T;
  let cause = said.slice(0, MOST_CAUSE);
  try {
    cause = (JSON.parse(said) as { error: string }).error;
  } catch {
    // not the pages' own words, but those of what stands before them
  }
  throw new Error(cause || `${answer.status} ${answer.statusText}`);
}

/** True where one of the runs was going on when there were news. */
export let going = true;

export async function overview(): Promise<Overview> {
  return embedded ? embedded.overview : get<Overview>("overview");
}

export async function curves(names: string[]): Promise<Curves> {
  if (embedded) return embedded.curves;
  const headers = { "Content-Type": "application/json" };
  return told<Curves>(await fetch("api/curves", { method: "POST", headers, body: JSON.stringify(names) }));
}

export async function health(): Promise<Rule[]> {
  return (embedded ? embedded.health : await get<{ rules: Rule[] }>("health")).rules;
}

export async function timeline(run: number, time: { from: number; to: number } | null): Promise<Timeline> {
  if (embedded) return time ? within(embedded.timelines[run]!, time) : joined(embedded.timelines[run]!);
  const ends: Asked = time ? { time_from: String(time.from), time_to: String(time.to) } : {};
  return get<Timeline>("timeline", { run: String(run), ...ends });
}

/** Who waits for whom now; nothing of a run that has ended, and in a file. */
export async function waits(run: number): Promise<Waits> {
  return embedded ? { at: null, unseen: 0, lines: [] } : get<Waits>("waits", { run: String(run) });
}

/** Of a file that has some of the rollouts: how many, in words. */
export function extract(): string {
  const [held, all] = [embedded?.rollouts.rows.length ?? 0, embedded?.rollouts.count ?? 0];
  return held < all ? `of the ${held.toLocaleString()} in this file; the runs have ${all.toLocaleString()}` : "";
}

export async function rollouts(asked: Asked, begin: number, most: number): Promise<Rows> {
  if (embedded) {
    const rows = matching(embedded.rollouts.rows, asked);
    return { count: rows.length, rows: rows.slice(begin, begin + most) };
  }
  return get<Rows>("rollouts", { ...asked, begin: String(begin), most: String(most) });
}

export async function rollout(run: number, number: number): Promise<Detail> {
  if (!embedded) return get<Detail>("rollout", { run: String(run), number: String(number) });
  const found = embedded.details[`${run}/${number}`];
  if (!found) throw new Error("this rollout is not in the file");
  return found;
}

/** Calls back whenever the runs have gone on; tells whether the server is there. A page that nobody sees
 * lets go of its connection, of which a browser has six in all; seen again, it is told at once.
 */
export function follow(news: () => void, there: (is: boolean) => void): void {
  if (embedded) return;
  let stream: EventSource | null = null;
  const listen = (): void => {
    stream?.close();
    stream = document.hidden ? null : new EventSource("api/live");
    if (!stream) return;
    stream.onerror = () => there(false);
    stream.onmessage = (event: MessageEvent<string>) => {
      going = (JSON.parse(event.data) as { going: boolean }).going;
      there(true);
      news();
    };
  };
  document.addEventListener("visibilitychange", listen);
  listen();
}

const MOST_CAUSE = 300; // characters of a fault
const MOST_WRITTEN = 20_000; // characters of a rollout that are searched
const MOST_SPANS = 1000; // of steps

/** What is searched of a rollout, beside its row. */
function texts(row: Row): string[] {
  const turns = embedded?.details[`${row.run}/${row.number}`]?.sequences?.flatMap((each) => each.turns) ?? [];
  const written = turns.map((turn) => turn.tokens.join("")).join("\n").slice(0, MOST_WRITTEN);
  return [...turns.flatMap((turn) => turn.searches.map((each) => each.query)), written];
}

/** The spans of a list of steps, as the server reads it. */
function spans(text: string): [number, number][] {
  const parts = text.split(",").map((part) => part.trim()).filter(Boolean);
  if (parts.length > MOST_SPANS) throw new Error(`steps: more than ${MOST_SPANS} spans: ask for fewer`);
  return parts.map((part) => {
    const [, first = "", dash, last = ""] = /^(\d{0,15})(?:\s*([-–])\s*(\d{0,15}))?$/.exec(part) ?? [];
    if (!first && !last) throw new Error(`steps = ${JSON.stringify(part.slice(0, 40))}: give steps and spans of steps, such as 31-40,55`);
    return [Number(first), dash ? Number(last || 1e15) : Number(first)];
  });
}

const MOST_BINS = 800; // of a lane that is drawn

/** The bins of a file that lie between two times. */
function within(all: Timeline, time: { from: number; to: number }): Timeline {
  const first = Math.max(0, Math.floor((time.from - all.from) / all.width));
  const end = Math.min(all.bins, Math.max(first + 1, Math.ceil((time.to - all.from) / all.width)));
  const cut = (state: State): State => ({ ...state, levels: state.levels.slice(first, end) });
  const [from, to] = [all.from + first * all.width, all.from + end * all.width];
  return joined({ ...all, from, to, bins: end - first, lanes: all.lanes.map((lane) => ofStates(lane, cut)) });
}

/** As many bins as can be seen, with the means over them; the last one ends with the time that is shown. */
function joined(all: Timeline): Timeline {
  const times = Math.ceil(all.bins / MOST_BINS);
  const bins = Math.ceil(all.bins / times);
  const mean = (values: number[]): number => values.reduce((sum, value) => sum + value, 0) / (values.length || 1);
  const join = (state: State): State => ({
    ...state,
    mean: mean(state.levels),
    levels: Array.from({ length: bins }, (_, n) => mean(state.levels.slice(n * times, (n + 1) * times))),
  });
  return { ...all, bins, width: all.width * times, lanes: all.lanes.map((lane) => ofStates(lane, join)) };
}

function ofStates(lane: Lane, made: (state: State) => State): Lane {
  return { ...lane, busy: made(lane.busy), states: lane.states.map(made) };
}

/** The server's own selection, of the rows that a file has. */
function matching(rows: Row[], asked: Asked): Row[] {
  const words = (asked.text ?? "").toLowerCase();
  const within = (value: number | null, name: string): boolean => {
    const [from, to] = [asked[`${name}_from`], asked[`${name}_to`]];
    if (!from && !to) return true;
    return value !== null && value >= Number(from || -1e9) && value <= Number(to || 1e9);
  };
  const steps = spans(asked.steps ?? "");
  const which = asked.which && (Object.hasOwn(WHICH, asked.which) ? WHICH[asked.which] : null);
  if (which === null) throw new Error(`which = ${JSON.stringify(asked.which!.slice(0, 40))}: choose one of ${Object.keys(WHICH).join(", ")}, or leave it out`);
  const kept = rows.filter(
    (row) =>
      (!asked.run || row.run === Number(asked.run)) &&
      (!asked.kind || row.kind === asked.kind) &&
      (!asked.stop || row.stop === asked.stop) &&
      (!which || which.of(row)) &&
      (!asked.question || row.question_id === asked.question) &&
      (!asked.group || row.group_id === Number(asked.group)) &&
      (!asked.actor || row.actor === asked.actor) &&
      (!asked.time_from || row.at >= Number(asked.time_from)) &&
      (!asked.time_to || row.begun <= Number(asked.time_to)) &&
      (!steps.length || steps.some(([first, last]) => row.step !== null && row.step >= first && row.step <= last)) &&
      within(row.reward, "reward") &&
      within(row.searches, "searches") &&
      within(row.staleness, "staleness") &&
      [row.question, row.expected, row.answer, ...texts(row)].join("\n").toLowerCase().includes(words),
  );
  const asked_by = (asked.sort || "number") as keyof Row;
  const several = !asked.run && embedded!.overview.runs.length > 1;
  const by = asked_by === "number" && several ? "at" : asked_by; // records of several runs: as they came
  const sign = asked.descending === "0" ? 1 : -1;
  return kept.sort((one, other) => {
    const [a, b] = [one[by], other[by]];
    if (a === b && asked_by === "number") return (one.run - other.run || one.number - other.number) * sign;
    if (a === b) return other.number - one.number;
    if (a === null || b === null) return a === null ? 1 : -1;
    return (a < b ? -1 : 1) * sign;
  });
}
