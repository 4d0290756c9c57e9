// Asks the service that served this page. A token lives in this module, and nowhere else.

const LONGEST_MS = 20_000;

/** What the API answered instead, in its own words. */
export class Failure extends Error {
  constructor(text, status) {
    super(text);
    this.status = status;
  }
}

/** The service did not answer at all. */
export class Silence extends Failure {}

let token = "";
let proven = "";
let asking = null;
let isDeclined = false;
let askForToken = async () => null;
let heard = () => {};

/** `ask(why)` gives a token or null; `hear(isAnswered)` is told after each call. */
export function begin({ ask, hear }) {
  askForToken = ask;
  heard = hear;
}

/** After this, calls nobody pressed a button for may ask for a token again. */
export function allowAsking() {
  isDeclined = false;
}

/** The answer's JSON. A call with `isQuiet` asks for no token once somebody said: not now. */
export async function call(method, path, { body, headers = {}, isQuiet = false } = {}) {
  for (;;) {
    const given = token;
    const bearer = given ? { Authorization: `Bearer ${given}` } : {};
    const answer = await send(method, path, { body, headers: { ...headers, ...bearer } });
    if (!answer.headers.has("WWW-Authenticate")) {
      if (given === token) proven = given;
      return read(answer);
    }
    const why = await wordsOf(answer);
    if (given !== token) continue; // another call got a newer one meanwhile
    if (isQuiet && isDeclined) throw new Failure(why, answer.status);
    asking ??= askForToken(given ? `It was not taken: ${why}` : why).finally(() => { asking = null; });
    const entered = await asking;
    isDeclined = entered === null;
    token = entered ?? proven;
    if (entered === null) throw new Failure(why, answer.status);
  }
}

/** The text of what anybody may read. */
export async function text(path) {
  const answer = await send("GET", path, {});
  if (!answer.ok) throw new Failure(await wordsOf(answer), answer.status);
  return answer.text();
}

/** Of an id. A browser would take these two for steps to another path. */
export function pathOf(id) {
  if (id === "." || id === "..") throw new Failure(`${id} cannot be asked for over HTTP; take blackbox’s own id`, 0);
  return `requests/${encodeURIComponent(id)}`;
}

async function send(method, path, { body, headers }) {
  let answer;
  try {
    answer = await fetch(path, { method, body, headers, cache: "no-store", signal: AbortSignal.timeout(LONGEST_MS) });
  } catch {
    heard(false);
    throw new Silence("the service does not answer", 0);
  }
  heard(true);
  return answer;
}

async function read(answer) {
  if (!answer.ok) throw new Failure(await wordsOf(answer), answer.status);
  return answer.json();
}

async function wordsOf(answer) {
  try {
    return String((await answer.json()).error);
  } catch {
    return `the service answered with status ${answer.status}`;
  }
}
