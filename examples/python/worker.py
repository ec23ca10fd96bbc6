"""A Longshore worker that needs only the standard library; README.md explains how to use it."""
import json, os, signal, sys, threading, time, urllib.error, urllib.request

def wait(payload, stop):
    if stop.wait(payload["seconds"]):
        raise InterruptedError("stopped while waiting")
HANDLERS = {"echo": lambda payload, stop: payload, "wait": wait}
SERVER, QUEUES, KINDS = (sys.argv[1:] + ["http://127.0.0.1:8080", "default", ",".join(HANDLERS)][len(sys.argv) - 1:])[:3]
SLOTS, STALE_AFTER = int(os.environ.get("LONGSHORE_SLOTS", 4)), float(os.environ.get("LONGSHORE_STALE_AFTER", 60))
HEADERS = {"content-type": "application/json", "authorization": f"Bearer {os.environ.get('LONGSHORE_TOKEN')}"}
worker, held, slots, exiting = {"id": None, "renew_within": STALE_AFTER / 4}, set(), threading.Semaphore(SLOTS), threading.Event()

def call(path, body, timeout=10, method="POST"):  # returns status and response; the status is 0 if there is no response
    request = urllib.request.Request(SERVER + path, json.dumps(body).encode(), HEADERS, method=method)
    try:
        with urllib.request.urlopen(request, timeout=timeout) as response:
            return response.status, json.loads(response.read() or "{}")
    except Exception as error:
        message = error.read(1000).decode(errors="replace") if isinstance(error, urllib.error.HTTPError) else str(error)
        return getattr(error, "code", 0), {"error": message, "jobs": [], "lost": [], "cancel": []}

def run(worker_id, job, stop):
    try:
        end = {"outcome": "succeeded", "result": json.loads(json.dumps(HANDLERS[job["kind"]](job["payload"], stop)))}
    except Exception as error:
        end = {"outcome": "cancelled" if stop.is_set() else "failed", "error": repr(error)}
    while stop in held:  # until the server accepts it; settling twice is harmless
        status, response = call("/leases/settle", {"worker_id": worker_id, "items": [stop.lease | end]})
        if status in (400, 413, 422):  # the server cannot store this result
            end = {"outcome": "failed", "error": response["error"]}
        if status == 200: held.discard(stop)
        else: print("not settled:", job["id"], response["error"], file=sys.stderr) or time.sleep(0.5)
    slots.release()

def renew(last_renewed=time.monotonic()):
    while not time.sleep(worker["renew_within"] / 3):
        sent, body = time.monotonic(), {"worker_id": worker["id"], "leases": [stop.lease for stop in list(held)]}
        status, response = call("/leases/renew", body, worker["renew_within"]) if worker["id"] else (200, {"lost": [], "cancel": []})
        last_renewed = sent if status == 200 else last_renewed
        dead = status == 409 or sent - last_renewed > 3 * worker["renew_within"]  # disconnected: the server soon declares us dead
        for stop in list(held):
            if dead: held.discard(stop)  # nothing to settle; the server releases leases that we do not name as held
            if dead or stop.lease in response["lost"] + response["cancel"]: stop.set()
        if dead: worker["id"] = None  # the next call registers again

signal.signal(signal.SIGTERM, lambda *_: exiting.set())
threading.Thread(target=renew, daemon=True).start()
while slots.acquire() and not exiting.is_set():
    status, response = call("/leases", {"worker_id": worker["id"], "held": [stop.lease for stop in list(held)],
        "queues": QUEUES.split(","), "kinds": KINDS.split(","), "stale_after_seconds": STALE_AFTER, "wait_seconds": 5}, 30)
    [stop.set() for stop in list(held) if stop.lease in response["cancel"]]
    for job in response["jobs"]:
        stop = threading.Event()
        stop.lease = {"id": job["id"], "lease_no": job["lease_no"]}
        held.add(stop) or threading.Thread(target=run, args=[response["worker_id"], job, stop]).start()
    if status == 200: worker.update(id=response["worker_id"], renew_within=response["renew_within_seconds"])
    else: print(response["error"], file=sys.stderr) or exiting.wait(1)
    if not response["jobs"]: slots.release()
[slots.acquire() for _ in range(SLOTS - 1)]  # wait for running handlers
call(f"/leases/{worker['id']}", {}, method="DELETE")
