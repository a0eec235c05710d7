#!/usr/bin/env bash
# Puts load on the model `generate`, or on the OpenAI gateway, with genai-perf:
#   genai_perf.sh {generate|chat} [genai-perf options]
#
#   URL            generate: gRPC address of the server; chat: address of the gateway  (127.0.0.1:8001, 127.0.0.1:9000)
#   MODEL          chat: the gateway's name of the model                               (deepseek-demo)
#   TOKENIZER      directory of the checkpoint                                         (checkpoints/deepseek-demo)
#   GENAI_PERF     the program; install_genai_perf.sh       (genai-perf, on the PATH)
#   PERF_ANALYZER  the program; install_perf_analyzer.sh    (perf_analyzer, on the PATH)
#   CONCURRENCY    streams at the same time                 (4)
#   REQUESTS       requests to send                         (100)
#
# --artifact-dir DIR is where it writes its figures, profile_export_genai_perf.json among them (artifacts).
set -euo pipefail

root=$(cd "$(dirname "$0")/../.." && pwd)
kind=${1:-}
case $kind in
generate) target=(-m generate --endpoint-type kserve --backend vllm -u "${URL:-127.0.0.1:8001}") ;;
chat) target=(-m "${MODEL:-deepseek-demo}" --endpoint-type chat -u "${URL:-127.0.0.1:9000}") ;;
*)
    echo "usage: $0 {generate|chat} [genai-perf options]" >&2
    exit 2 ;;
esac
shift

# genai-perf runs the perf_analyzer that it finds first.
[ -z "${PERF_ANALYZER:-}" ] || export PATH="${PERF_ANALYZER%/*}:$PATH"
HF_HUB_OFFLINE=1 exec "${GENAI_PERF:-genai-perf}" profile "${target[@]}" --streaming \
    --tokenizer "${TOKENIZER:-$root/checkpoints/deepseek-demo}" --synthetic-input-tokens-mean 24 --output-tokens-mean 24 \
    --num-dataset-entries 8 --concurrency "${CONCURRENCY:-4}" --request-count "${REQUESTS:-100}" "$@"
