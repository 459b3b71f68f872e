// The pages by the address's fragment, drawn anew when the runs go on.

import "./style.css";
import { fit, lookAgain, looks } from "./chart";
import { h } from "./dom";
import * as health from "./health";
import * as overview from "./overview";
import { pressed } from "./press";
import * as rollouts from "./rollouts";
import { follow, going, isFile, type Asked } from "./source";
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
let held = false; // news that wait until the reader lets go
let settled = ""; // the id of a select in which a choice was made: it holds news no more
let served: boolean | null = null; // not known yet

function place(): { name: string; asked: Asked } {
  const [name = "", query = ""] = location.hash.slice(1).split("?");
  return { name: name in PAGES ? name : "overview", asked: Object.fromEntries(new URLSearchParams(query)) };
}

/** Draws the page; `live`: because of news, and not while the reader holds something. */
async function draw(live = false): Promise<void> {
  const generation = ++drawing;
  const { name, asked } = place();
  for (const each of nav.children) {
    if (each.getAttribute("href") === `#${name}`) each.setAttribute("aria-current", "page");
    else each.removeAttribute("aria-current");
  }
  document.title = `Forage: ${PAGES[name]!.title}`;
  let made: HTMLElement;
  try {
    made = await PAGES[name]!.page(asked);
  } catch (error) {
    made = h("p", { class: "bad", role: "alert" }, `This cannot be shown: ${String(error)}`);
  }
  if (generation !== drawing) return;
  if (live && busy()) {
    hold(true);
    return;
  }
  const same = main.dataset.page === name;
  const [top, before, focused] = [same ? scrollY : 0, same ? looks() : new Map(), same ? document.activeElement?.id : ""];
  main.dataset.page = name;
  main.replaceChildren(made);
  drawnAt = Date.now();
  hold(false);
  fit();
  lookAgain(before);
  const choice = settled;
  if (focused) document.getElementById(focused)?.focus({ preventScroll: true });
  settled = choice; // the focus is where it was
  scrollTo(0, top);
}

function news(): void {
  if (!PAGES[place().name]!.live) {
    hold(pressed());
    if (!held) window.dispatchEvent(new Event("news"));
    return;
  }
  clearTimeout(waiting);
  waiting = window.setTimeout(renew, Math.max(0, drawnAt + LIVE_MS - Date.now()));
}

function renew(): void {
  if (busy()) hold(true);
  else void draw(true);
}

/** True where text of the page is selected. */
function selected(): boolean {
  const found = getSelection();
  return !!found && !found.isCollapsed && found.getRangeAt(0).intersectsNode(main);
}

/** True while a pointer is down, text is selected, or a field has the focus in which no choice was made: drawn anew, what
 * is done there is lost.
 */
function busy(): boolean {
  const at = document.activeElement;
  return pressed() || selected() || (main.contains(at) && !!at?.matches("input, select, textarea") && !(at.id && at.id === settled));
}

function hold(is: boolean): void {
  held = is;
  if (served === null) return;
  const until = pressed() ? "let go" : selected() ? "select no text" : "leave the field";
  const there = going ? (held ? `live again once you ${until}` : "live") : `no run goes on${held ? `: drawn once you ${until}` : ""}`;
  state.textContent = served ? there : "the server is gone";
}

/** Draws what has waited, when nothing is held any more. */
function free(): void {
  if (held) (PAGES[place().name]!.live ? renew : news)();
}

nav.replaceChildren(...Object.entries(PAGES).map(([name, { title }], n) =>
  h("a", { href: `#${name}`, title: `${title} (${n + 1})` }, title)));
window.addEventListener("released", free);
document.addEventListener("selectionchange", () => { if (!selected()) free(); });
for (const name of ["pointerdown", "keydown", "focusin"]) main.addEventListener(name, () => { settled = ""; }, true);
main.addEventListener("change", (event) => {
  settled = (event.target as HTMLElement).id;
  window.setTimeout(free);
});
main.addEventListener("focusout", () => window.setTimeout(free));
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
  served = is;
  hold(held);
  state.classList.toggle("bad", !is);
});
await draw();
