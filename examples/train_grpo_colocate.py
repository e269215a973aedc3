"""The example of "No GPU left behind: Unlocking Efficiency with Co-located vLLM in TRL" (Hugging Face, 2025),
as it was published but for the import.

Where completions come from is one more option of `GRPOConfig`:

    engine="native"         from the trainer's own parameters; also what the script does as it stands
    engine="vllm"           from vLLM in the trainer's process, asleep while it trains
    engine="rollout_server" from other GPUs: `colocate rollout-serve Qwen/Qwen2-0.5B-Instruct --engine vllm`
"""

from datasets import load_dataset
from colocate import GRPOConfig, GRPOTrainer

# Load dataset
dataset = load_dataset("trl-lib/tldr", split="train")

# Define the reward function
def reward_len(completions, **kwargs):
    return [-abs(20 - len(completion)) for completion in completions]

# Define training arguments
training_args = GRPOConfig(
    output_dir="Qwen2-0.5B-GRPO",
    logging_steps=1,
    use_vllm=True,
    vllm_mode="colocate",
    vllm_tensor_parallel_size=1,
    vllm_gpu_memory_utilization=0.3,
    max_prompt_length=512,
    max_completion_length=1024,
    max_steps=2,
    num_generations=4,
    num_train_epochs=1,
    per_device_train_batch_size=4,
    push_to_hub=False,
    report_to=None
)

# Create and run the trainer
trainer = GRPOTrainer(
    model="Qwen/Qwen2-0.5B-Instruct",
    reward_funcs=reward_len,
    args=training_args,
    train_dataset=dataset,
)

trainer.train()
