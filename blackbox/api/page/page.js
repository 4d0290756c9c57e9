// Starts the page: what is refreshed how often, and how errors are shown.

import { Failure, Silence, allowAsking, begin } from "./api.js";
import { askForToken } from "./dialogs.js";
import { byId, repeat, say } from "./dom.js";
import * as letters from "./letters.js";
import * as metrics from "./metrics.js";
import * as requests from "./requests.js";
import * as send from "./send.js";
import * as standing from "./standing.js";
import { time } from "./words.js";

const troubles = new Map();
let answeredMs = Date.now();

function hear(isAnswered) {
  const status = byId("answering");
  if (isAnswered) {
    answeredMs = Date.now();
    troubles.delete("silence");
    say(status, `answered at ${time(answeredMs)}`);
  } else {
    troubles.set("silence", `No answer since ${time(answeredMs)}, trying again.`);
    say(status, "no answer");
  }
  status.className = `answering ${isAnswered ? "good" : "bad"}`;
  showTroubles();
}

function showTroubles() {
  byId("trouble").hidden = troubles.size === 0;
  byId("give-token").hidden = ![...troubles.values()].some((trouble) => trouble.status === 401);
  const words = troubles.has("silence") ? [troubles.get("silence")] : [...troubles.values()].map((trouble) => trouble.message);
  const text = [...new Set(words)].join(" ");
  if (byId("trouble-text").textContent !== text) byId("trouble-text").textContent = text;
}

/** Call `look` repeatedly; its error is shown at the top of the page until a call succeeds. */
function watch(name, ms, look) {
  return repeat(ms, async () => {
    try {
      await look();
      troubles.delete(name);
    } catch (error) {
      if (!(error instanceof Failure)) throw error;
      if (!(error instanceof Silence)) troubles.set(name, error);
    }
    showTroubles();
  });
}

begin({ ask: askForToken, hear });
metrics.start();
standing.start({ list: requests.list });
requests.start();
letters.start();
send.start();
const stats = watch("stats", 3000, () => standing.look({ search: requests.searchFor }));
byId("span").addEventListener("change", stats);
const dead = watch("letters", 5000, letters.look);
const watches = [
  stats,
  dead,
  watch("requests", 4000, requests.look),
  watch("metrics", 2000, () => metrics.look({ died: dead })),
];
byId("give-token").addEventListener("click", () => {
  allowAsking();
  for (const look of watches) look();
});
