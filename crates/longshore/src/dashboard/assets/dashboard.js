// The script of the dashboard. Pages can be read without it. It keeps them up to date, sends the
// forms of actions to the API, and adds the palette and the shortcuts. It has no other state than
// the page: the server renders everything.

const root = document.documentElement;
const base = document.body.dataset.base ?? "";
const $ = (selector, from = document) => from.querySelector(selector);
const all = (selector, from = document) => [...from.querySelectorAll(selector)];

// ---- theme ----------------------------------------------------------------

const THEME = "longshore-theme";
const stored = {
  get(key) { try { return localStorage.getItem(key); } catch { return null; } },
  set(key, value) { try { localStorage.setItem(key, value); } catch { /* storage is off */ } },
};
if (stored.get(THEME)) root.dataset.theme = stored.get(THEME);

function toggleTheme() {
  const isDark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = isDark ? "light" : "dark";
  stored.set(THEME, root.dataset.theme);
}

// ---- times ----------------------------------------------------------------

// The difference between the database's clock and this one, in milliseconds.
let clockOffset = 0;

function readClock() {
  const now = Date.parse($("#main")?.dataset.now ?? "");
  if (now) clockOffset = now - Date.now();
}

// As `relative` on the server.
function relative(ms) {
  const s = Math.floor(Math.abs(ms) / 1000);
  if (s === 0) return "now";
  const text = s < 60 ? `${s} s` : s < 3570 ? `${Math.round(s / 60)} min` : s < 84600 ? `${Math.round(s / 3600)} h` : `${Math.round(s / 86400)} d`;
  return ms > 0 ? `${text} ago` : `in ${text}`;
}

// As `duration` on the server, without milliseconds.
function duration(ms) {
  const s = Math.max(0, Math.floor(ms / 1000));
  const two = (big, bigUnit, small, smallUnit) => (small ? `${big} ${bigUnit} ${small} ${smallUnit}` : `${big} ${bigUnit}`);
  if (s < 60) return `${s} s`;
  if (s < 3600) return two(Math.floor(s / 60), "min", s % 60, "s");
  if (s < 86400) return two(Math.floor(s / 3600), "h", Math.floor((s % 3600) / 60), "min");
  return two(Math.floor(s / 86400), "d", Math.floor((s % 86400) / 3600), "h");
}

function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

function tick() {
  const now = Date.now() + clockOffset;
  for (const time of all("time[data-relative]")) setText(time, relative(now - Date.parse(time.dateTime)));
  for (const time of all("time[data-since]")) setText(time, duration(now - Date.parse(time.dateTime)));
}

// ---- patching -------------------------------------------------------------

// Makes `live` like `next`, and keeps what the reader did: focus, selection, typed text, checked
// boxes, open details. What has `data-keep` stays as it is.
function patch(live, next) {
  if (live.nodeType !== Node.ELEMENT_NODE) {
    if (live.data !== next.data) live.data = next.data;
    return;
  }
  if (live.dataset && "keep" in live.dataset) {
    // A field that the reader has not changed shows the new value.
    if (live.defaultValue === undefined || live.value !== live.defaultValue || live === document.activeElement) return;
    live.value = live.defaultValue = next.defaultValue;
    return;
  }
  // Readers open details, and the script shows what has `data-keep-hidden`.
  const isKept = (name) => (name === "open" && live.nodeName === "DETAILS") || (name === "hidden" && "keepHidden" in live.dataset);
  for (const { name, value } of [...next.attributes]) {
    if (live.getAttribute(name) !== value && !isKept(name)) live.setAttribute(name, value);
  }
  for (const { name } of [...live.attributes]) {
    if (!next.hasAttribute(name) && !isKept(name)) live.removeAttribute(name);
  }
  patchChildren(live, next);
}

// Not `node.id`: in a form, that is the field with the name `id`.
const idOf = (node) => node.getAttribute?.("id") ?? "";

function patchChildren(live, next) {
  const wanted = new Set(all(":scope > [id]", next).map(idOf));
  const known = new Map(all(":scope > [id]", live).map((child) => [idOf(child), child]));
  let cursor = live.firstChild;
  const dropGone = () => {
    while (cursor && idOf(cursor) && !wanted.has(idOf(cursor))) {
      const gone = cursor;
      cursor = cursor.nextSibling;
      gone.remove();
    }
  };
  for (const child of [...next.childNodes]) {
    dropGone();
    const isAlike = cursor && cursor.nodeName === child.nodeName && idOf(cursor) === idOf(child);
    const match = idOf(child) ? known.get(idOf(child)) : isAlike ? cursor : null;
    if (!match || match.nodeName !== child.nodeName) {
      live.insertBefore(document.importNode(child, true), cursor);
    } else {
      if (match === cursor) cursor = cursor.nextSibling;
      else live.insertBefore(match, cursor);
      patch(match, child);
    }
  }
  while (cursor) {
    const gone = cursor;
    cursor = cursor.nextSibling;
    gone.remove();
  }
}

// Examples name the address of this server.
function prepare(element) {
  for (const code of all(".snippet code, .snippet [data-copy]", element)) {
    const here = (text) => text.replace(/http:\/\/localhost:8080/, location.origin);
    if (code.dataset.copy) code.dataset.copy = here(code.dataset.copy);
    else code.textContent = here(code.textContent);
  }
}

// ---- live updates ---------------------------------------------------------

const isLive = "live" in document.body.dataset;
const MIN_PAUSE = 1000;
const MAX_PAUSE = 15000;
// Not the time of day: a clock that is set back must not stop updates.
const elapsed = () => performance.now();
let lastRefresh = elapsed();
let timer = null;
let isRefreshing = false;
let isRefreshWanted = false;
let isFreshWanted = false;

function showLive(state, why) {
  const sign = $("#live");
  if (!sign) return;
  sign.dataset.state = state;
  sign.title = why;
  setText($("span", sign), state === "on" ? "Live" : state === "off" ? "Reconnecting" : "Paused");
}

const sleep = (ms) => new Promise((resolve) => setTimeout(resolve, ms));

// Shows the state after an action. A refresh that has begun may show the one before.
async function refreshAfterAction() {
  while (isRefreshing) await sleep(30);
  await refresh(true);
}

async function refresh(isFresh = false) {
  if (isRefreshing) {
    isRefreshWanted = true;
    isFreshWanted ||= isFresh;
    return;
  }
  isFresh ||= isFreshWanted;
  isFreshWanted = false;
  isRefreshing = true;
  lastRefresh = elapsed();
  try {
    const headers = { "Longshore-Fragment": "1" };
    if (isFresh) headers["Cache-Control"] = "no-cache";
    // A request that hangs must not prevent later ones.
    const response = await fetch(location.href, { headers, signal: AbortSignal.timeout(20_000) });
    if (response.status === 401) return logIn();
    if (!response.ok) throw new Error((await problem(response)).message);
    const next = new DOMParser().parseFromString(await response.text(), "text/html").getElementById("main");
    if (next) {
      prepare(next);
      const focused = document.activeElement;
      patch($("#main"), next);
      // A browser drops the focus of an element that moves.
      if (focused !== document.activeElement && focused?.isConnected) focused.focus({ preventScroll: true });
      readClock();
      showSelection();
      showRow();
    }
    showLive("on", "This page updates itself.");
  } catch (error) {
    showLive("off", `The last update failed: ${error.message}`);
  } finally {
    isRefreshing = false;
    if (isRefreshWanted) {
      isRefreshWanted = false;
      refreshSoon();
    }
  }
}

// At most once per second, and not in a hidden tab.
function refreshSoon() {
  if (!isLive || timer || document.hidden) return;
  const wait = Math.max(0, lastRefresh + MIN_PAUSE - elapsed());
  timer = setTimeout(() => {
    timer = null;
    refresh();
  }, wait);
}

// Something changed. The server keeps data for a second, so a second refresh follows.
let secondRefresh = null;
function noticed() {
  refreshSoon();
  clearTimeout(secondRefresh);
  secondRefresh = setTimeout(refreshSoon, MIN_PAUSE + 100);
}

// One tab holds the lock and the event stream, and forwards its notices to the others: a browser opens
// only six connections to a server. A hidden tab gives the lock back.
const channel = isLive && "BroadcastChannel" in window ? new BroadcastChannel(`longshore${base}`) : null;
let giveBack = null;

function listen() {
  if (!isLive || giveBack) return;
  if (!navigator.locks || !channel) return; // Then the page is refreshed at intervals.
  const stop = new AbortController();
  let release;
  const released = new Promise((resolve) => { release = resolve; });
  giveBack = () => {
    giveBack = null;
    stop.abort();
    release();
  };
  const hold = async () => {
    const notice = () => {
      noticed();
      channel.postMessage("changed");
    };
    let stream = null;
    let again = null;
    const open = () => {
      stream = new EventSource(`${base}/events`);
      for (const name of ["job", "job_removed", "queue", "worker", "gap", "reset"]) stream.addEventListener(name, notice);
      // A browser tries again by itself, except after a reply other than 200.
      stream.onerror = () => {
        if (stream.readyState === EventSource.CLOSED) again = setTimeout(open, 5000);
      };
    };
    open();
    await released;
    clearTimeout(again);
    stream.close();
  };
  navigator.locks.request(`longshore${base}`, { signal: stop.signal }, hold).catch(() => {});
}

if (isLive) {
  if (channel) channel.onmessage = noticed;
  const whenVisible = () => {
    if (document.hidden) {
      giveBack?.();
      return;
    }
    listen();
    if (elapsed() - lastRefresh >= MIN_PAUSE) refreshSoon();
  };
  document.addEventListener("visibilitychange", whenVisible);
  addEventListener("pagehide", () => giveBack?.());
  addEventListener("pageshow", (event) => event.persisted && whenVisible());
  if (!document.hidden) listen();
  // The page may show what another tab read a moment ago, and no event follows what happened before.
  secondRefresh = setTimeout(refreshSoon, MIN_PAUSE + 100);
  showLive("on", "This page updates itself.");
  const pause = navigator.locks ? MAX_PAUSE : 3000;
  setInterval(() => elapsed() - lastRefresh >= pause && refreshSoon(), 1000);
}

// ---- requests -------------------------------------------------------------

async function problem(response) {
  try {
    return await response.json();
  } catch {
    return { message: `The server replied with ${response.status}.` };
  }
}

// Requests that change something carry this header, which a page of another site cannot send.
async function call(method, url, body) {
  const headers = { "Longshore-Session": "1", Accept: "application/json" };
  if (body) headers["Content-Type"] = "application/json";
  const response = await fetch(url, { method, headers, body });
  if (response.status === 401 && !url.endsWith("/session")) logIn();
  if (!response.ok) throw new Error((await problem(response)).message);
  return response.status === 204 ? {} : response.json().catch(() => ({}));
}

function logIn() {
  location.href = `${base}/ui/login?next=${encodeURIComponent(location.pathname + location.search)}`;
}

function toast(text, isError = false) {
  const message = document.createElement("p");
  message.className = isError ? "toast is-error" : "toast";
  message.textContent = text;
  $("#toasts").append(message);
  setTimeout(() => message.remove(), isError ? 9000 : 3500);
}

// `yes` is the label of the button that acts, such as `Retry 30 jobs`; the other one reads `Do not retry`.
function confirmed(question, yes) {
  const dialog = $("#confirm");
  if (dialog.open) return Promise.resolve(false);
  setText($("#confirm-text"), question);
  setText($("#confirm-yes"), yes);
  setText($("#confirm-no"), `Do not ${yes.split(" ")[0].toLowerCase()}`);
  dialog.returnValue = "";
  dialog.showModal();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => resolve(dialog.returnValue === "yes"), { once: true });
  });
}

// JSON without the space between its parts, which may make it too long. Numbers and strings stay as they are.
function withoutSpace(json) {
  return json.replace(/"(?:[^"\\]|\\.)*"|\s+/g, (part) => (part[0] === '"' ? part : ""));
}

// The fields of a form as JSON. Values that are JSON stay text, so that no number loses digits.
function fieldsOf(form) {
  const parts = [];
  for (const field of form.elements) {
    if (!field.name || field.type === "submit") continue;
    const text = field.dataset.json ? field.value.trim() : field.value;
    const add = (json) => parts.push(`${JSON.stringify(field.name)}:${json}`);
    switch (field.dataset.json) {
      case "raw":
        try {
          JSON.parse(text);
        } catch (error) {
          field.focus();
          throw new Error(`${field.name} is not JSON: ${error.message}`);
        }
        add(withoutSpace(text));
        break;
      case "number":
        if (text) add(Number(text));
        break;
      case "number-or-null":
        add(text ? Number(text) : "null");
        break;
      case "rate":
        add(text ? `{"starts":${Number(text)}}` : "null");
        break;
      case "list": {
        const items = text.split(",").map((item) => item.trim()).filter(Boolean);
        if (items.length) add(JSON.stringify(items));
        break;
      }
      default:
        if (text) add(JSON.stringify(text));
    }
  }
  return parts.length ? `{${parts.join(",")}}` : undefined;
}

// The filters of the list of jobs that this tab showed last.
const LIST = `longshore-list${base}`;
function lastList() {
  try { return sessionStorage.getItem(LIST); } catch { return null; }
}
if (location.pathname === `${base}/ui/jobs`) {
  try { sessionStorage.setItem(LIST, location.search); } catch { /* storage is off */ }
}
for (const link of all("a[data-list]")) link.setAttribute("href", link.getAttribute("href") + (lastList() ?? ""));

const busy = new WeakSet();

async function act(form) {
  if (busy.has(form)) return;
  busy.add(form);
  // Read before the question: a live update may change the form while the reader thinks.
  const { method, confirm: question, yes, done, then } = form.dataset;
  try {
    const [url, body] = [form.getAttribute("action"), fieldsOf(form)];
    if (question && !(await confirmed(question, yes ?? $("button", form).textContent))) return;
    form.setAttribute("aria-busy", "true");
    if (then) {
      // Its subject may be deleted now.
      while (isRefreshing) await sleep(30);
      isRefreshing = true;
    }
    const result = await call(method, url, body);
    toast(done);
    // Back to the list as it was.
    if (then === `${base}/ui/jobs`) location.href = then + (lastList() ?? "");
    else if (then) location.href = then.replace(/\{(\w+)\}/g, (_, field) => encodeURIComponent(result[field] ?? ""));
    else await refreshAfterAction();
  } catch (error) {
    if (then) isRefreshing = false;
    toast(error.message, true);
  } finally {
    busy.delete(form);
    form.removeAttribute("aria-busy");
  }
}

// Opens the page that the reader wanted, if it is one of ours.
function openNext(home) {
  const wanted = new URLSearchParams(location.search).get("next") ?? home;
  const next = URL.canParse(wanted, location.origin) ? new URL(wanted, location.origin) : null;
  const isOurs = next?.origin === location.origin && (next.pathname === home || next.pathname.startsWith(`${home}/`));
  location.replace(isOurs ? next.href : home);
}

// A browser sends no cookie with a link from another site, so it ends here although the session lasts.
async function openWithSession(form) {
  if (new URLSearchParams(location.search).has("again")) return;
  const state = await fetch(form.dataset.state).then((response) => response.json()).catch(() => ({}));
  if (state.logged_in) openNext(form.dataset.home);
}

async function submitLogin(form) {
  try {
    await call("POST", form.dataset.api, JSON.stringify({ token: form.elements.token.value.trim() }));
    openNext(form.dataset.home);
  } catch (error) {
    setText($("#login-error"), error.message);
  }
}

document.addEventListener("submit", (event) => {
  const form = event.target;
  if (idOf(form) === "login") {
    event.preventDefault();
    submitLogin(form);
  } else if (idOf(form) === "bulk") {
    event.preventDefault();
    operate(form, event.submitter.value);
  } else if (form.matches(".action")) {
    event.preventDefault();
    act(form);
  }
});

// ---- selection and operations ---------------------------------------------

let isAllMatching = false;
// The selected jobs. Live updates may move them to another page.
const selected = new Map();
const boxes = () => all('#jobs input[name="id"]');
const rowOf = (box) => {
  const row = box.closest("tr");
  return { status: row.dataset.status, kind: $(".c-kind", row).textContent };
};
function note(box) {
  if (box.checked) selected.set(box.value, rowOf(box));
  else selected.delete(box.value);
}
const number = (n) => Number(n).toLocaleString("en");

function showSelection() {
  const bar = $("#bulk");
  if (!bar) return;
  for (const box of boxes()) {
    box.checked = selected.has(box.value) || isAllMatching;
    if (selected.has(box.value)) selected.set(box.value, rowOf(box));
  }
  const chosen = boxes().filter((box) => box.checked);
  bar.hidden = selected.size === 0 && !isAllMatching;
  const total = bar.dataset.matching ? `all ${about(bar)}${number(bar.dataset.matching)} matching` : "all matching";
  const away = selected.size - boxes().filter((box) => selected.has(box.value)).length;
  const elsewhere = away > 0 ? `, ${number(away)} no longer on this page` : "";
  setText($("#bulk-count"), isAllMatching ? `${total} selected` : `${selected.size} selected${elsewhere}`);
  const matching = $("[data-select-matching]", bar);
  if (matching) matching.hidden = isAllMatching || selected.size === Number(bar.dataset.matching);
  const statuses = selectedStatuses(bar);
  const has = (...some) => some.some((status) => statuses.includes(status));
  const buttons = Object.fromEntries(all('button[name="action"]', bar).map((button) => [button.value, button]));
  const isWaiting = !has("failed", "succeeded", "cancelled", "running");
  buttons.retry.hidden = statuses.every((status) => status === "running");
  setText(buttons.retry, isWaiting ? "Run now" : "Retry");
  buttons.cancel.hidden = !has("queued", "retrying", "running");
  buttons.delete.hidden = !has("failed", "succeeded", "cancelled");
  const page = $("[data-select-page]");
  page.checked = chosen.length > 0 && chosen.length === boxes().length;
  page.indeterminate = chosen.length > 0 && !page.checked;
}

// The statuses of the selected jobs.
function selectedStatuses(bar) {
  if (isAllMatching) return bar.dataset.statuses.split(" ");
  return [...new Set([...selected.values()].map((job) => job.status))];
}

// The number of matching jobs may be an estimate.
const about = (bar) => ("estimated" in bar.dataset ? "about " : "");

const jobs = (n) => (Number(n) === 1 ? "1 job" : `${number(n)} jobs`);

// The selected jobs in words: `30 failed jobs of email_customer`.
function selection(bar) {
  const kinds = isAllMatching ? [bar.dataset.kind] : [...new Set([...selected.values()].map((job) => job.kind))];
  const statuses = selectedStatuses(bar);
  const count = isAllMatching ? bar.dataset.matching : selected.size;
  const noun = Number(count) === 1 ? "job" : "jobs";
  const words = [count ? (isAllMatching ? about(bar) : "") + number(count) : "all", statuses.length === 1 ? `${statuses[0]} ${noun}` : noun];
  if (kinds.length === 1 && kinds[0]) words.push(`of ${kinds[0]}`);
  if (isAllMatching) words.push("that match the filters");
  return { text: words.join(" "), short: count ? jobs(count) : "all jobs" };
}

function select(isChosen) {
  if (!isChosen) {
    isAllMatching = false;
    selected.clear();
  }
  for (const box of boxes()) {
    box.checked = isChosen;
    note(box);
  }
  showSelection();
}

async function operate(form, action) {
  const ids = [...selected.keys()];
  const verb = action[0].toUpperCase() + action.slice(1);
  const { text, short } = selection(form);
  const isRerun = action === "retry" && selectedStatuses(form).includes("succeeded");
  const warning = action === "delete" ? " Their history is lost. Jobs that have not ended are skipped."
    : isRerun ? " Jobs that have succeeded run again, too." : "";
  const which = isAllMatching ? `"filter":${form.dataset.filter}` : `"ids":${JSON.stringify(ids)}`;
  if (!(await confirmed(`${verb} ${text}?${warning}`, `${verb} ${short}`))) return;
  try {
    const operation = await call("POST", form.getAttribute("action"), `{"action":"${action}",${which}}`);
    const here = new URL(location.href);
    here.searchParams.set("operation", operation.id);
    location.href = here.href;
  } catch (error) {
    toast(error.message, true);
  }
}

const ENDED = { done: "Done", stopped: "Stopped", failed: "Failed" };
const PAST = { retry: "retried", cancel: "cancelled", delete: "deleted" };

async function watchOperation() {
  const panel = $("#operation");
  if (!panel) return;
  const url = `${base}/operations/${encodeURIComponent(panel.dataset.operation)}`;
  const [stop, resume, bar] = [$("[data-operation-stop]", panel), $("[data-operation-resume]", panel), $("[data-operation-bar]", panel)];
  const control = (verb) => async () => {
    try {
      await call("POST", `${url}/${verb}`);
    } catch (error) {
      toast(error.message, true);
    }
    step();
  };
  if (stop) stop.onclick = control("stop");
  if (resume) resume.onclick = control("resume");
  let next = null;
  const step = async () => {
    clearTimeout(next);
    try {
      const operation = await call("GET", url);
      const ended = ENDED[operation.state];
      const share = operation.expected ? Math.min(100, (operation.examined / operation.expected) * 100) : 0;
      // The list shows the result before the text says that it is done.
      if (ended) await refreshAfterAction();
      else refreshSoon();
      panel.hidden = false;
      setText($("[data-operation-text]", panel), operation.error ? `${ended ?? "Working"}: ${operation.error}` : ended ?? "Working");
      const of = ended || !operation.expected ? "" : `, ${number(operation.examined)} of about ${number(operation.expected)} examined`;
      setText($("[data-operation-numbers]", panel),
        `${jobs(operation.changed)} ${PAST[operation.action] ?? "changed"}, ${number(operation.skipped)} skipped${of}`);
      if (ended === "Done") bar.value = 100;
      else if (operation.expected) bar.value = share;
      if (stop) stop.hidden = Boolean(ended);
      if (resume) resume.hidden = !ended || ended === "Done";
      if (!ended) next = setTimeout(step, 1000);
    } catch (error) {
      panel.hidden = false;
      setText($("[data-operation-text]", panel), error.message);
      next = setTimeout(step, 3000);
    }
  };
  step();
}

// ---- rows -----------------------------------------------------------------

let here = null;

function showRow() {
  for (const row of all("tr.is-here")) row.classList.remove("is-here");
  if (here && here.isConnected) here.classList.add("is-here");
}

function moveRow(step) {
  const rows = all("tr[data-row]");
  if (!rows.length) return;
  const at = rows.indexOf(here);
  here = rows[Math.max(0, Math.min(rows.length - 1, at < 0 ? 0 : at + step))];
  showRow();
  here.scrollIntoView({ block: "nearest" });
  $("a[data-open]", here)?.focus({ preventScroll: true });
}

// ---- palette --------------------------------------------------------------

const palette = $("#palette");
const input = $("#palette-input");
const list = $("#palette-list");
let entries = [];
let shown = [];
let chosen = 0;

const goTo = (url) => () => { location.href = url; };
const jobsWith = (name, value) => `${base}/ui/jobs?${name}=${encodeURIComponent(value)}`;

async function openPalette() {
  if (!palette || palette.open) return;
  const pages = all("a", $("#pages").content).map((a) => ({ text: a.textContent, hint: "page", run: goTo(a.getAttribute("href")) }));
  const actions = all("main .head .action").map((form) => ({ text: $("button", form).textContent, hint: "on this page", run: () => form.requestSubmit() }));
  const theme = { text: "Change between light and dark", hint: "command", run: toggleTheme };
  entries = [...actions, ...pages, theme];
  input.value = "";
  palette.showModal();
  showEntries();
  const read = (path) => call("GET", base + path).catch(() => []);
  const [kinds, queues] = await Promise.all([read("/kinds?limit=1000"), read("/queues")]);
  for (const { name } of queues) entries.push({ text: name, hint: "queue", run: goTo(`${base}/ui/queues/${encodeURIComponent(name)}`) });
  for (const { name } of kinds) entries.push({ text: name, hint: "kind", run: goTo(`${base}/ui/kinds/${encodeURIComponent(name)}`) });
  showEntries();
}

let search = 0;
async function showEntries() {
  const text = input.value.trim().toLowerCase();
  const current = ++search;
  const matching = entries.filter((entry) => entry.text.toLowerCase().includes(text));
  const typed = input.value.trim();
  // The server knows whether it is the id of a job or of a flow.
  const isId = /^[0-9a-f]{8}(-?[0-9a-f]{4}){3}-?[0-9a-f]{12}$/.test(text);
  if (isId) matching.push({ text: `Open ${typed}`, hint: "id", run: goTo(`${base}/ui/search?q=${encodeURIComponent(typed)}`) });
  else if (text) matching.push({ text: `Jobs whose error contains “${typed}”`, hint: "search", run: goTo(jobsWith("error", typed)) });
  render(matching);
  if (!text || isId) return;
  const read = (path) => call("GET", base + path).catch(() => []);
  // At most 128 bytes, as names of groups. After the pause, a quickly typed word is one search.
  await sleep(120);
  if (current !== search) return;
  const groups = await read(`/groups?limit=5&name=${encodeURIComponent(typed.slice(0, 42))}`);
  if (current !== search || !groups.length) return;
  const named = groups.map(({ queue, name, paused }) => {
    const url = `${base}/ui/queues/${encodeURIComponent(queue)}?group=${encodeURIComponent(name)}#group-${encodeURIComponent(name)}`;
    return { text: name, hint: `${paused ? "paused " : ""}group of ${queue}`, run: goTo(url) };
  });
  // The last entry searches errors.
  render([...matching.slice(0, -1), ...named, ...matching.slice(-1)]);
}

function render(matching) {
  shown = matching.slice(0, 14);
  chosen = 0;
  list.replaceChildren(...shown.map((entry, i) => {
    const item = document.createElement("li");
    item.id = `entry-${i}`;
    item.setAttribute("role", "option");
    const [text, hint] = [document.createElement("span"), document.createElement("span")];
    text.textContent = entry.text;
    hint.textContent = entry.hint;
    hint.className = "faint";
    item.append(text, hint);
    item.onclick = () => runEntry(i);
    return item;
  }));
  choose(0);
}

function choose(i) {
  chosen = Math.max(0, Math.min(shown.length - 1, i));
  for (const [j, item] of [...list.children].entries()) item.setAttribute("aria-selected", String(j === chosen));
  list.children[chosen]?.scrollIntoView({ block: "nearest" });
  input.setAttribute("aria-activedescendant", `entry-${chosen}`);
}

function runEntry(i) {
  palette.close();
  shown[i]?.run();
}

input?.addEventListener("input", showEntries);
input?.addEventListener("keydown", (event) => {
  const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
  if (step) choose(chosen + step);
  else if (event.key === "Enter") runEntry(chosen);
  else return;
  event.preventDefault();
});

// ---- keys and clicks ------------------------------------------------------

const PAGES = { o: "", j: "/jobs", q: "/queues", f: "/flows", k: "/kinds", w: "/workers", c: "/cron", s: "/settings" };
let wentAt = 0;

document.addEventListener("keydown", (event) => {
  if ((event.metaKey || event.ctrlKey) && event.key.toLowerCase() === "k") {
    event.preventDefault();
    if (!$("dialog[open]")) openPalette();
    return;
  }
  const isTyping = event.target.closest("input:not([type=checkbox]), textarea, select, dialog[open]");
  if (isTyping || event.metaKey || event.ctrlKey || event.altKey || !isLive) return;
  const afterG = Date.now() - wentAt < 1200;
  wentAt = 0;
  if (afterG && event.key in PAGES) location.href = `${base}/ui${PAGES[event.key]}`;
  else if (event.key === "g") wentAt = Date.now();
  else if (event.key === "j") moveRow(1);
  else if (event.key === "k") moveRow(-1);
  else if (event.key === "x" && here) $('input[type="checkbox"]', here)?.click();
  else if (event.key === "/") openPalette();
  else if (event.key === "?") $("#keys").showModal();
  else return;
  event.preventDefault();
});

async function copy(button, text) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    // Without HTTPS there is no clipboard; this older way still works.
    const area = document.createElement("textarea");
    area.value = text;
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
  button.classList.add("is-done");
  toast("Copied.");
  setTimeout(() => button.classList.remove("is-done"), 1500);
}

document.addEventListener("click", (event) => {
  const button = event.target.closest("button, a");
  if (!button) return;
  const has = (name) => button.hasAttribute(name);
  if (has("data-copy")) copy(button, button.dataset.copy);
  else if (has("data-copy-code")) copy(button, $("pre", button.closest(".panel")).textContent);
  else if (has("data-theme-toggle")) toggleTheme();
  else if (has("data-select-none")) select(false);
  else if (has("data-select-matching")) {
    select(true);
    isAllMatching = true;
    showSelection();
  } else if (has("data-logout")) call("DELETE", `${base}/session`).then(logIn, (error) => toast(error.message, true));
  else if (has("data-keys")) {
    event.preventDefault();
    $("#keys").showModal();
  }
});

document.addEventListener("change", (event) => {
  const field = event.target;
  if (field.matches("[data-select-page]")) select(field.checked);
  else if (field.matches('#jobs input[name="id"]')) {
    isAllMatching &&= field.checked;
    note(field);
    showSelection();
  }
  else if (field.matches("[data-kind]")) {
    // The form of another kind has its schema; what was typed is kept.
    const payload = $('textarea[name="payload"]', field.form);
    if (payload.value === payload.defaultValue) location.search = `?kind=${encodeURIComponent(field.value)}`;
  }
});

$("#find")?.addEventListener("mousedown", (event) => {
  event.preventDefault();
  openPalette();
});

// On a phone the list of pages and the tabs are wider than the screen.
for (const strip of all(".side nav, .tabs")) {
  const current = $("[aria-current]", strip);
  if (current) strip.scrollLeft = current.offsetLeft - strip.offsetLeft - (strip.clientWidth - current.offsetWidth) / 2;
}

prepare(document);
readClock();
if ($("#login")) openWithSession($("#login"));
setInterval(tick, 1000);
showSelection();
watchOperation();
if (!/Mac|iPhone|iPad/.test(navigator.platform)) for (const key of all(".find kbd")) key.textContent = "Ctrl K";
