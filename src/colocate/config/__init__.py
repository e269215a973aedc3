"""`GRPOConfig` and what it is read from: run files, launchers, configurations of DeepSpeed and FSDP."""
