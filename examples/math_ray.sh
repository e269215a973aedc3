#!/usr/bin/env bash
# GRPO on mathematics through Ray, on all GPUs of this machine, or --num_nodes and --gpus_per_node of a cluster:
#
#     bash examples/math_ray.sh TP [--option value ...]
#
# TP GPUs compute each completion together. Who generates is whatever is installed: TensorRT-LLM (here, or where
# TRTLLM_PYTHON says; with colocate-trtllm), else vLLM, else the native engine. Later options override those below.
set -euo pipefail
tp=${1:?"the tensor-parallel size is missing: bash examples/math_ray.sh 1"}
shift

has() { python -c "import importlib.util as u, sys; sys.exit(u.find_spec('$1') is None)"; }
if [ -n "${TRTLLM_PYTHON:-}" ]; then
    engine=(--engine trtllm --trtllm_tensor_parallel_size "$tp" --trtllm_python "$TRTLLM_PYTHON")
elif has tensorrt_llm; then
    engine=(--engine trtllm --trtllm_tensor_parallel_size "$tp")
elif has vllm; then
    engine=(--engine vllm --vllm_tensor_parallel_size "$tp")
else
    engine=(--engine native --shard "$tp")
fi

places=()
case " $* " in
    *" --gpus_per_node "* | *" --ranks_per_node "*) ;;
    *) places=(--gpus_per_node "$(python -c 'import torch; print(torch.cuda.device_count())')") ;;
esac

exec python -m colocate train \
    --model_name_or_path Qwen/Qwen2.5-7B-Instruct \
    --dataset_name trl-lib/DeepMath-103K \
    --reward_funcs accuracy_reward \
    --output_dir runs/math_ray \
    --num_generations 8 \
    --per_device_train_batch_size 32 \
    --max_completion_length 1024 \
    --launcher ray "${places[@]}" "${engine[@]}" "$@"
