"use strict";
// A live page asks its server for new facts. The file of a report has no such script.
(() => {
const PAUSE_MS = 1000;
const told = document.getElementById("live");
let version = "";

async function look() {
  let ended = false;
  try {
    const answer = await fetch("facts", { headers: version ? { "If-None-Match": version } : {}, cache: "no-store" });
    if (answer.status === 200) {
      const detail = await answer.json();
      version = answer.headers.get("ETag");
      ended = detail.ended;
      document.dispatchEvent(new CustomEvent("kinetic-facts", { detail }));
      told.textContent = ended ? "Ended: this is the last snapshot." : "Live: this page refreshes itself.";
    } else if (answer.status !== 304) {
      told.textContent = `This snapshot is old: ${await answer.text()}`;
    }
  } catch {
    told.textContent = "This snapshot is old: kinetic no longer serves this page.";
  }
  document.documentElement.dataset.live = ended ? "ended" : "yes";
  if (!ended) setTimeout(look, PAUSE_MS);
}
look();
})();
