// Whether a pointer is down: what is drawn anew under it loses its click.

let down = false;
let presses = 0;

/** True from when a pointer goes down until its click is over. */
export function pressed(): boolean {
  return down;
}

/** Resolves once no pointer is down. */
export async function released(): Promise<void> {
  while (down) await new Promise((resolve) => window.addEventListener("released", resolve, { once: true }));
}

/** A pointer was let go; after a menu of the browser's own nobody says so. */
function letGo(): void {
  const press = presses;
  window.setTimeout(() => {
    if (press !== presses) return;
    down = false;
    window.dispatchEvent(new Event("released"));
  });
}

window.addEventListener("pointerdown", () => { down = true; presses += 1; });
for (const name of ["pointerup", "pointercancel", "contextmenu", "blur"]) window.addEventListener(name, letGo);
window.addEventListener("pointermove", (event) => { if (down && !event.buttons) letGo(); });
