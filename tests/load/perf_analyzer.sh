#!/usr/bin/env bash
# Puts load on a running server with perf_analyzer:  perf_analyzer.sh {speculative|generate} [perf_analyzer options]
#
#   URL            gRPC address of the server               (127.0.0.1:8001)
#   PERF_ANALYZER  the program; install_perf_analyzer.sh    (perf_analyzer, on the PATH)
#   CONCURRENCY    sequences or streams at the same time    (4)
#   REQUESTS       requests to send; open sequences are then ended, with one request more for each    (100)
#                  (the time is taken in whole seconds: figures need runs of ten seconds or more)
#   SEQUENCE_ID    first sequence id, below 2**31; runs at the same time need ids apart    (from the process id)
#
# --profile-export-file FILE.json (a new file) keeps every request with the times and contents of its responses.
set -euo pipefail

here=$(cd "$(dirname "$0")" && pwd)
model=${1:-}
concurrency=${CONCURRENCY:-4}
case $model in
speculative)
    # --sync: in the asynchronous mode the END of the last sequences may overtake their START.
    # No --sequence-length: a sequence is as long as its list, which ends with step -1 so that it may end early.
    mode=(--sync --max-threads "$concurrency" --sequence-id-range "${SEQUENCE_ID:-$(($$ % 2000000 * 1000 + 1))}") ;;
generate)
    mode=(--streaming --async) ;;
*)
    echo "usage: $0 {speculative|generate} [perf_analyzer options]" >&2
    exit 2 ;;
esac
shift

log=$(mktemp)
trap 'rm -f "$log"' EXIT
"${PERF_ANALYZER:-perf_analyzer}" -m "$model" -i grpc -u "${URL:-127.0.0.1:8001}" --input-data "$here/$model.json" \
    "${mode[@]}" --concurrency-range "$concurrency" --request-count "${REQUESTS:-100}" "$@" 2>&1 | tee "$log"

# perf_analyzer exits with 0 when only requests after the measurement have failed.
! grep -q 'had error' "$log"
