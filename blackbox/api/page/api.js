// Calls the API of the service that served this page. The token is kept in this module only.

const LONGEST_MS = 20_000;

/** An error answer of the API, with its text. */
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

/** `ask(why)` returns a token or null; `hear(isAnswered)` is called after each call. */
export function begin({ ask, hear }) {
  askForToken = ask;
  heard = hear;
}

/** Allow quiet calls to ask for a token again. */
export function allowAsking() {
  isDeclined = false;
}

/** Call the API; returns the answer's JSON. With `isQuiet` it does not ask for a token once the user declined. */
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
    if (given !== token) continue; // another call has got a newer token: retry with it
    if (isQuiet && isDeclined) throw new Failure(why, answer.status);
    asking ??= askForToken(given ? `The token was rejected: ${why}` : why).finally(() => { asking = null; });
    const entered = await asking;
    isDeclined = entered === null;
    token = entered ?? proven;
    if (entered === null) throw new Failure(why, answer.status);
  }
}

/** The text at a path that needs no token. */
export async function text(path) {
  const answer = await send("GET", path, {});
  if (!answer.ok) throw new Failure(await wordsOf(answer), answer.status);
  return answer.text();
}

/** The path of a request. A browser would resolve the ids `.` and `..` to another path. */
export function pathOf(id) {
  if (id === "." || id === "..") throw new Failure(`${id} cannot be requested over HTTP; use the id that blackbox assigned`, 0);
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
