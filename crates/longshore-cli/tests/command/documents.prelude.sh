# Runs before the commands of the documents, in the same shell. Functions replace what the
# reader would do in another terminal, or what a test must not do.
#
# EXPECTED  the status that the next curl must get, if it is not a success
# FOLDER    where this test keeps its own files
# PORT      the port of the API

set -u -o pipefail

trap 'kill $(jobs -p) 2> "$FOLDER/ignored"' EXIT

fail() { printf '%s\n' "$*" >> "$FOLDER/failed"; }

# The reader stops a process with Ctrl-C before starting another one in the same terminal.
stop() {
  [ -f "$FOLDER/$1.pid" ] || return 0
  local pid; pid=$(cat "$FOLDER/$1.pid")
  rm "$FOLDER/$1.pid"
  kill -INT "$pid" && wait "$pid" || fail "longshore $1 ended with $?: $(tail -3 "$FOLDER/$1.log")"
}

# Starts a process in its own terminal, and waits until it is ready.
start() {
  local terminal=$1; shift
  stop "$terminal"
  : > "$FOLDER/$terminal.log"
  # A background process of a script ignores SIGINT, unless something resets it.
  python3 -c 'import os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)
os.execvp("longshore", ["longshore", *sys.argv[1:]])' "$@" >> "$FOLDER/$terminal.log" 2>&1 &
  echo $! > "$FOLDER/$terminal.pid"
  until is_ready "$terminal"; do
    kill -0 $! 2> "$FOLDER/ignored" || { fail "longshore $*: $(cat "$FOLDER/$terminal.log")"; return 1; }
    sleep 0.05
  done
}

is_ready() {
  case $1 in
    server) command curl -s --noproxy '*' -o "$FOLDER/ignored" "http://127.0.0.1:$PORT/health" ;;
    worker) [ -s "$FOLDER/worker.log" ] && handles_ctrl_c "$(cat "$FOLDER/worker.pid")" ;;
  esac
}

# A worker writes its first lines before it handles signals.
handles_ctrl_c() {
  [ -r "/proc/$1/status" ] || return 0
  local caught; caught=$(sed -n 's/^SigCgt:[[:space:]]*//p' "/proc/$1/status")
  (( 16#${caught:-2} & 2 ))
}

# Presses Ctrl-C after the first output, or after a few seconds. It may come so early that nothing handles it.
until_ctrl_c() {
  python3 -c 'import select, signal, subprocess, sys
process = subprocess.Popen(["longshore", *sys.argv[1:]], stdout=subprocess.PIPE)
select.select([process.stdout], [], [], 4)
process.send_signal(signal.SIGINT)
sys.stdout.buffer.write(process.communicate()[0])
sys.exit(0 if process.returncode == -signal.SIGINT else process.returncode)' "$@"
}

longshore() {
  case " $* " in
    *" --drain "*) command longshore "$@" ;;
    " dev"*" --bind "* | " serve"*" --bind "*) start server "$@" ;;
    " dev "* | " serve "*) start server "$@" --bind "127.0.0.1:$PORT" ;;
    " worker "*) start worker "$@" ;;
    # These run until Ctrl-C.
    " events emit "* | " events show "*) command longshore "$@" ;;
    " events "* | *" --watch "*) until_ctrl_c "$@" ;;
    *) command longshore "$@" ;;
  esac
}

# The test has the binary already, and runs as part of `cargo xtask test` itself.
cargo() {
  case "$*" in
    "install --path "*) grep -q '^name = "longshore"$' "$REPOSITORY/$3/Cargo.toml" ;;
    "run --release -- "*) shift 3; longshore "$@" ;;
    "xtask test") grep -q '^xtask = ' "$REPOSITORY/.cargo/config.toml" ;;
    *) fail "unknown command: cargo $*" ;;
  esac
}

# Checks the status and records the call.
curl() {
  local limit=60 code
  # The stream of events does not end by itself.
  case "$*" in */events) limit=10 ;; esac
  code=$(command curl -sS --max-time $limit --noproxy '*' -o "$FOLDER/body" -w '%{http_code}' "$@" 2> "$FOLDER/errors")
  [ $limit = 10 ] || cat "$FOLDER/errors" >&2
  { printf '%s' "$1"; shift; printf '\037%s' "$@"; printf '\036'; } >> "$FOLDER/calls"
  cat "$FOLDER/body"
  : > "$FOLDER/body"
  case "$code" in "${EXPECTED:-2}"*) ;; *) fail "status $code: curl $*"; return 22 ;; esac
}

# libpq does not know Longshore's own parameters, which only the test's URL has.
psql() { command psql --quiet --set ON_ERROR_STOP=1 "${@%%\?*}"; }
pg_dump() { command pg_dump "${@%%\?*}"; }

# Not every machine has these two.
command -v sqlite3 > "$FOLDER/ignored" || sqlite3() {
  python3 -c 'import sqlite3, sys; sqlite3.connect(sys.argv[1]).executescript(sys.argv[2])' "$@"
}
command -v openssl > "$FOLDER/ignored" || openssl() { head -c 32 /dev/urandom | base64; }
