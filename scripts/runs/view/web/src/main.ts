// The pages by the address's fragment, drawn anew when the runs go on.

import "./style.css";
import { fit } from "./chart";
import { h } from "./dom";
import * as health from "./health";
import * as overview from "./overview";
import * as rollouts from "./rollouts";
import { follow, isFile, type Asked } from "./source";
import * as timeline from "./timeline";

const PAGES: Record<string, { title: string; page: (asked: Asked) => Promise<HTMLElement>; live: boolean }> = {
  overview: { title: "Overview", page: overview.page, live: true },
  rollouts: { title: "Rollouts", page: rollouts.page, live: false },
  health: { title: "Health", page: health.page, live: true },
  timeline: { title: "Timeline", page: timeline.page, live: false },
};
const LIVE_MS = 3000; // the least between two drawings of a page that is live

const main = document.querySelector("main")!;
const nav = document.querySelector("nav")!;
const state = document.querySelector("#live")!;
let drawing = 0;
let drawnAt = 0;
let waiting = 0;

function place(): { name: string; asked: Asked } {
  const [name = "", query = ""] = location.hash.slice(1).split("?");
  return { name: name in PAGES ? name : "overview", asked: Object.fromEntries(new URLSearchParams(query)) };
}

async function draw(): Promise<void> {
  const generation = ++drawing;
  const { name, asked } = place();
  nav.replaceChildren(...Object.entries(PAGES).map(([each, { title }], n) =>
    h("a", { href: `#${each}`, "aria-current": each === name ? "page" : undefined, title: `${title} (${n + 1})` }, title)));
  document.title = `Forage: ${PAGES[name]!.title}`;
  let made: HTMLElement;
  try {
    made = await PAGES[name]!.page(asked);
  } catch (error) {
    made = h("p", { class: "bad", role: "alert" }, `This cannot be shown: ${String(error)}`);
  }
  if (generation !== drawing) return;
  const top = main.dataset.page === name ? scrollY : 0;
  main.dataset.page = name;
  main.replaceChildren(made);
  drawnAt = Date.now();
  scrollTo(0, top);
  fit();
}

function news(): void {
  if (!PAGES[place().name]!.live) {
    window.dispatchEvent(new Event("news"));
    return;
  }
  clearTimeout(waiting);
  const busy = main.contains(document.activeElement) && document.activeElement?.tagName === "SELECT";
  waiting = window.setTimeout(() => void draw(), busy ? LIVE_MS : Math.max(0, drawnAt + LIVE_MS - Date.now()));
}

window.addEventListener("hashchange", () => void draw());
window.addEventListener("again", () => void draw());
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => void draw());
window.addEventListener("keydown", (event) => {
  const typing = (event.target as HTMLElement).matches("input, select, textarea");
  if (event.ctrlKey || event.metaKey || event.altKey || typing) return;
  const name = Object.keys(PAGES)[Number(event.key) - 1];
  if (name) location.hash = `#${name}`;
  else if (event.key === "/") main.querySelector<HTMLInputElement>("input[type=search]")?.focus();
  else return;
  event.preventDefault();
});
state.textContent = isFile ? "a copy" : "";
follow(news, (is) => {
  state.textContent = is ? "live" : "the server is gone";
  state.classList.toggle("bad", !is);
});
await draw();
