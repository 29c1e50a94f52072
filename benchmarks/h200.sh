#!/usr/bin/env bash
# What needs an H100 or H200, step by step: the tests, then every benchmark of docs.
#
#     benchmarks/h200.sh OUT STEP...      # benchmarks/h200.sh rows tests launches chain
#     benchmarks/h200.sh OUT              # all steps, in order of worth; about an hour and a half
#
# Rows go to OUT/<file>.jsonl, under the names of benchmarks/results/h200, and what a step printed to
# OUT/<step>.log. A step that fails or takes longer than its limit is told, and the next one starts.
# Kernels are compiled into HOPSPARSE_CACHE_DIR; `hopsparse compile --all` fills it on any machine.
set -u
cd "$(dirname "$0")/.."
out=${1:?where rows go}
shift
steps=(tests clock launches chain eight scaled mlp quantize few four experts bsr tiles csr selection attention prefill hybrid models)
mkdir -p "$out"
out=$(cd "$out" && pwd)
export PYTHONPATH=src:. PYTHONUNBUFFERED=1
python=${PYTHON:-python3}

# Seconds that a step may take, then its command.
run() {
  local limit=$1
  shift
  timeout -s INT "$limit" "$@" || failed=$?
}
bench() { run "$1" "$python" "benchmarks/$2.py" --out "$out/$3.jsonl" "${@:4}"; }
tests() { run "$1" "$python" -m pytest -v -p no:cacheprovider "${@:2}"; }

# Processes share the GPU: what measures time or energy must have it alone.
alone=(tests/gpu/test_clock.py tests/gpu/test_energy.py)

step() {
  case $1 in
    tests) tests 540 -n 12 --dist loadfile "${alone[@]/#/--ignore=}" tests/gpu ;;
    clock) tests 120 "${alone[@]}" ;;
    launches) bench 120 launches launches ;;
    chain) bench 180 chain chain ;;
    eight)
      for tokens in 256 4096 16384; do
        for dtype in float8_e4m3fn int8; do
          bench 240 gemm spmm_nm_scaled_anchors --dtype "$dtype" --only "$tokens"
        done
      done
      ;;
    scaled)
      for scaling in rows tensor; do
        bench 240 gemm spmm_nm_scaled_anchors --dtype float8_e4m3fn --scaling "$scaling" --only 1024
      done
      ;;
    mlp) bench 400 mlp mlp --dtype float8_e4m3fn int8 ;;
    quantize) bench 240 quantize_rows quantize_rows --only 4096x ;;
    few)
      bench 240 gemm spmm_nm_few --suite few --only bfloat16
      bench 240 gemm spmm_nm_scaled_few --suite few --dtype float8_e4m3fn
      ;;
    four) bench 120 four_bits four_bits ;;
    experts) bench 120 experts experts ;;
    bsr) bench 420 spmm_bsr spmm_bsr ;;
    tiles)
      bench 150 tile_search tile_search --budget-s 120
      bench 60 alignment alignment
      bench 120 alignment alignment_counters --counters
      ;;
    csr) bench 420 spmm_csr spmm_csr ;;
    selection) bench 180 selection selection ;;
    attention)
      bench 180 attention_scores attention_scores
      bench 180 attention_decode attention_decode
      ;;
    prefill) bench 460 attention_prefill attention_prefill ;;
    hybrid) bench 180 hybrid_gradient hybrid_gradient ;;
    models)
      run 580 "$python" -m hopsparse bench model --config llama-3-8b --out "$out/models.jsonl"
      ;;
    two) # on a machine with two GPUs
      tests 180 tests/gpu/test_tensor_parallel.py
      bench 120 tensor_parallel tensor_parallel
      bench 240 comm_nccl comm_nccl
      ;;
    *)
      echo "no step $1; there are: ${steps[*]}"
      return 2
      ;;
  esac
}

for name in "${@:-${steps[@]}}"; do
  began=$SECONDS failed=0
  step "$name" >"$out/$name.log" 2>&1 || failed=$?
  echo "$name: $((SECONDS - began)) s, rc $failed: $(tail -n 1 "$out/$name.log" | cut -c1-140)"
done
