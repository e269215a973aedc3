"""The names of the rollout engines."""

ENGINE_NAMES = ("native", "vllm", "rollout_server", "trtllm", "transformers")
"""What the option `engine` takes besides "auto"; `run/engines.py` has the function that makes each."""

OLDER_NAMES = {"vllm_server": "rollout_server"}
"""Names that the option takes, too, and the engines that they mean."""
