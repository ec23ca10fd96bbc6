"""A Longshore worker with nothing but the standard library; README.md says how to use it."""
import json, os, signal, sys, threading, time, urllib.error, urllib.request

def wait(payload, told):
    if told.wait(payload["seconds"]):
        raise InterruptedError("stopped while waiting")
HANDLERS = {"echo": lambda payload, told: payload, "wait": wait}
SERVER, QUEUES, KINDS = (sys.argv[1:] + ["http://127.0.0.1:8080", "default", ",".join(HANDLERS)][len(sys.argv) - 1:])[:3]
SLOTS, STALE_AFTER = int(os.environ.get("LONGSHORE_SLOTS", 4)), float(os.environ.get("LONGSHORE_STALE_AFTER", 60))
HEADERS = {"content-type": "application/json", "authorization": f"Bearer {os.environ.get('LONGSHORE_TOKEN')}"}
me, held, free, stopping = {"id": None, "within": STALE_AFTER / 4}, set(), threading.Semaphore(SLOTS), threading.Event()

def call(path, body, patience=10, method="POST"):  # status and answer; status 0 if none came
    request = urllib.request.Request(SERVER + path, json.dumps(body).encode(), HEADERS, method=method)
    try:
        with urllib.request.urlopen(request, timeout=patience) as answer:
            return answer.status, json.loads(answer.read() or "{}")
    except Exception as broken:
        why = broken.read(1000).decode(errors="replace") if isinstance(broken, urllib.error.HTTPError) else str(broken)
        return getattr(broken, "code", 0), {"error": why, "jobs": [], "lost": [], "cancel": []}

def run(worker, job, told):
    try:
        end = {"outcome": "succeeded", "result": json.loads(json.dumps(HANDLERS[job["kind"]](job["payload"], told)))}
    except Exception as error:
        end = {"outcome": "cancelled" if told.is_set() else "failed", "error": repr(error)}
    while told in held:  # until the server answers: settling again does no harm
        status, answer = call("/leases/settle", {"worker_id": worker, "items": [told.lease | end]})
        if status in (400, 413, 422):  # a result that cannot be stored
            end = {"outcome": "failed", "error": answer["error"]}
        if status == 200: held.discard(told)
        else: print("not settled:", job["id"], answer["error"], file=sys.stderr) or time.sleep(0.5)
    free.release()

def renew(heard=time.monotonic()):
    while not time.sleep(me["within"] / 3):
        sent, body = time.monotonic(), {"worker_id": me["id"], "leases": [told.lease for told in list(held)]}
        status, answer = call("/leases/renew", body, me["within"]) if me["id"] else (200, {"lost": [], "cancel": []})
        heard = sent if status == 200 else heard
        dead = status == 409 or sent - heard > 3 * me["within"]  # or cut off, and dead soon
        for told in list(held):
            if dead: held.discard(told)  # nothing to settle; what is not named as held goes back
            if dead or told.lease in answer["lost"] + answer["cancel"]: told.set()
        if dead: me["id"] = None  # begin anew

signal.signal(signal.SIGTERM, lambda *_: stopping.set())
threading.Thread(target=renew, daemon=True).start()
while free.acquire() and not stopping.is_set():
    status, answer = call("/leases", {"worker_id": me["id"], "held": [told.lease for told in list(held)],
        "queues": QUEUES.split(","), "kinds": KINDS.split(","), "stale_after_seconds": STALE_AFTER, "wait_seconds": 5}, 30)
    for job in answer["jobs"]:
        told = threading.Event()
        told.lease = {"id": job["id"], "lease_no": job["lease_no"]}
        held.add(told)
        threading.Thread(target=run, args=[answer["worker_id"], job, told]).start()
    if status == 200: me.update(id=answer["worker_id"], within=answer["renew_within_seconds"])
    else: print(answer["error"], file=sys.stderr) or stopping.wait(1)
    if not answer["jobs"]: free.release()
[free.acquire() for _ in range(SLOTS - 1)]  # what runs may finish
call(f"/leases/{me['id']}", {}, method="DELETE")
